"""Recurrent states in arrays of cells per layer, and the cells of each slot by position.

A recurrent state summarizes all earlier positions and cannot be truncated, so a slot keeps snapshots of
earlier states. A snapshot needs no copy, because the next step reads the state's cell and writes another
cell. A slot takes a snapshot before every step of several rows, and before the first single-row step after
such a step. Beyond `n_snapshots`, the oldest snapshot is replaced. With speculation, each slot has one more
cell for the state before its last run with a draft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vkbackend.buffer import Home
from vkbackend.meta.plan import Plan
from vkbackend.meta.split import Ranges, State, split
from vkbackend.meta.stores import Stores
from vkbackend.models.architectures.memory_specs import LayerState, StateSpec
from vkbackend.models.options import Options
from vkbackend.step import Run


@dataclass(frozen=True, slots=True)
class StatePlan:
    """A layer's recurrent state. `units` maps a dimension to each device's range. `n_cells` counts all slots'
    cells."""

    layer: int
    spec: StateSpec
    units: Mapping[str, Ranges]
    n_cells: int
    home: Home

    def arrays(self) -> list[tuple[str, int, State]]:
        """Return (name, values per cell, split) of each array."""
        arrays: list[tuple[str, int, State]] = []
        spec: StateSpec | None = self.spec
        while spec:
            for name, segments in spec.arrays:
                how = split(1, self.units[spec.dim], segments)
                arrays.append((f"state_{name}_l{self.layer}", spec.n_units * sum(segments), how))
            spec = spec.extra
        return arrays

    def names(self) -> list[str]:
        return [name.removeprefix("state_").rpartition("_l")[0] for name, _, _ in self.arrays()]

    def nbytes(self, device: int) -> list[int]:
        return [4 * self.n_cells * state.count(device) for _, _, state in self.arrays()]


def n_cells(options: Options) -> int:
    return options.n_slots * cells_per_slot(options)


def cells_per_slot(options: Options) -> int:
    return 1 + options.n_snapshots + bool(options.speculation)


def plan_states(
    specs: Sequence[object], plans: Sequence[Plan], homes: Sequence[Home], options: Options
) -> list[StatePlan]:
    return [
        StatePlan(il, spec, plans[il].ranges, n_cells(options), homes[il])
        for il, spec in enumerate(specs)
        if isinstance(spec, StateSpec)
    ]


class RecurrentState:
    def __init__(self, stores: Stores, plans: Sequence[StatePlan], options: Options) -> None:
        self.plans = plans
        self.layers: dict[int, LayerState] = {}
        for plan in self.plans:
            weights = [
                stores.cache(name, plan.n_cells, n, "f32", state, plan.home)
                for name, n, state in plan.arrays()
            ]
            self.layers[plan.layer] = LayerState(dict(zip(plan.names(), weights, strict=True)))
        self.slots = SlotStates(options.n_slots, options.n_snapshots, bool(options.speculation))

    def __bool__(self) -> bool:
        return bool(self.plans)


class SlotStates:
    """If `undoes` is set, a slot can always go back to the beginning of its last run with a draft."""

    def __init__(self, n_slots: int, n_snapshots: int, undoes: bool = False) -> None:
        n_own = n_slots * (1 + undoes)
        self._free = list(range(n_own + n_slots * n_snapshots - 1, n_own - 1, -1))
        self._most = n_snapshots
        self._cells = list(range(n_slots))  # The cell that each slot's steps write.
        self._positions = [0] * n_slots  # Positions in this cell's state, or 0 without a state.
        self._undo_cells = list(range(n_slots, n_own))
        self._undo_positions = [0] * n_slots
        # Each slot's snapshots, as position -> cell, oldest first.
        self._snapshots: list[dict[int, int]] = [{} for _ in range(n_slots)]
        self._was_long = [False] * n_slots
        self._lent: dict[int, tuple[int, int]] = {}  # Slot -> (position, cell).
        self.spare: Callable[[], int | None] = lambda: None  # Returns a cell of the prefix cache, or None.

    def resume_at(self, slot: int, position: int) -> int:
        """Return the last position up to `position` at which the slot can continue, or 0."""
        known = [0, self._positions[slot], self._undo_positions[slot], *self._snapshots[slot]]
        if slot in self._lent:
            known.append(self._lent[slot][0])
        return max(at for at in known if at <= position)

    def cell(self, slot: int, position: int) -> int:
        if position == self._positions[slot] and position:
            return self._cells[slot]
        if position == self._undo_positions[slot] and position:
            return self._undo_cells[slot]
        if position == self._lent.get(slot, (-1, -1))[0]:
            return self._lent[slot][1]
        return self._snapshots[slot][position]

    def advance(self, run: Run) -> tuple[int, int]:
        """Return the cells that the run reads and writes."""
        slot, at = run.slot, run.first_pos
        lent_at, lent = self._lent.pop(slot, (-1, -1))
        if at == 0:
            self._drop(slot, -1)
            read = self._cells[slot]
        elif lent_at == at:
            self._drop(slot, at)
            read = lent
        else:
            assert self.resume_at(slot, at) == at, f"slot {slot} has no state at position {at}"
            read = self.cell(slot, at)
            self._drop(slot, at)
        is_long = (
            run.n_rows > 1 and not run.undoes
        )  # Snapshots of drafts would replace the prompt's snapshot.
        if read == self._cells[slot] and at:
            keeps = self._most and (is_long or self._was_long[slot]) and self._keep(slot, at)
            if run.undoes and not keeps:
                self._cells[slot], self._undo_cells[slot] = self._undo_cells[slot], read
                self._undo_positions[slot] = at
        self._positions[slot] = at + run.n_rows
        self._was_long[slot] = is_long
        return read, self._cells[slot]

    def _keep(self, slot: int, position: int) -> bool:
        """Make the slot's state a snapshot. Return False if no cell is free."""
        kept = self._snapshots[slot]
        if len(kept) == self._most:
            self._free.append(kept.pop(min(kept)))
        cell = self._free.pop() if self._free else self.spare()
        if cell is None:
            return False
        kept[position] = self._cells[slot]
        self._cells[slot] = cell
        return True

    def put(self, slot: int, position: int) -> int:
        """Return the cell for the state after `position` positions, which the caller writes."""
        self._drop(slot, -1)
        self._positions[slot], self._was_long[slot] = position, True
        return self._cells[slot]

    def take(self, slot: int, position: int) -> int | None:
        return self._snapshots[slot].pop(position, None)

    def give_back(self, cell: int) -> None:
        self._free.append(cell)

    def lend(self, slot: int, position: int, cell: int) -> None:
        """Make the slot's next run begin at `position` with another owner's cell."""
        self._drop(slot, -1)
        self._positions[slot], self._lent[slot] = 0, (position, cell)

    def drop(self, slot: int) -> None:
        self._drop(slot, -1)
        self._lent.pop(slot, None)
        self._positions[slot], self._was_long[slot] = 0, False

    def _drop(self, slot: int, position: int) -> None:
        kept = self._snapshots[slot]
        for at in [at for at in kept if at > position]:
            self._free.append(kept.pop(at))
        if self._undo_positions[slot] > position:
            self._undo_positions[slot] = 0
