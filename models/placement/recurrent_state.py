"""Recurrent states in arrays of cells per layer, and the cells of each slot by position.

A recurrent state summarizes all earlier positions and cannot be truncated, so a slot keeps snapshots of
earlier states. A snapshot needs no copy, because the next step reads the state's cell and writes another
cell. A slot takes a snapshot before every step of several rows, and before the first single-row step after
such a step. Beyond `n_snapshots`, the oldest snapshot is replaced.

With speculation, a run with a draft stores the state after each row in cells that all slots share. The slot
then continues from the state after the accepted tokens. If these cells take too much memory, each slot has an
undo cell instead. It holds the state before the last run with a draft, and accepted tokens are computed
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from vkbackend.buffer import Home
from vkbackend.meta.plan import Plan
from vkbackend.meta.split import Ranges, State, split
from vkbackend.meta.stores import Stores
from vkbackend.models.architectures.memory_specs import LayerState, StateSpec
from vkbackend.models.options import Options
from vkbackend.ops import MAX_VEC_ROWS
from vkbackend.step import Run

ROW_STATES_SHARE = 1 / 8  # States after rows may take at most this share of the weights' bytes.


@dataclass(frozen=True, slots=True)
class StatePlan:
    """A layer's recurrent state. `units` maps a dimension to each device's range. `n_cells` counts all cells,
    including `n_row_cells` cells for the states after rows of drafts."""

    layer: int
    spec: StateSpec
    units: Mapping[str, Ranges]
    n_cells: int
    home: Home
    n_row_cells: int = 0

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

    @property
    def cell_nbytes(self) -> int:
        """Return the number of bytes of one cell on all devices."""
        return 4 * sum(n for _, n, _ in self.arrays())

    def names(self) -> list[str]:
        return [name.removeprefix("state_").rpartition("_l")[0] for name, _, _ in self.arrays()]

    def nbytes(self, device: int) -> list[int]:
        return [4 * self.n_cells * state.count(device) for _, _, state in self.arrays()]


def plan_states(
    specs: Sequence[object],
    plans: Sequence[Plan],
    homes: Sequence[Home],
    weight_nbytes: int,
    options: Options,
) -> list[StatePlan]:
    """`weight_nbytes` counts the model's weights."""
    states = [
        StatePlan(il, spec, plans[il].ranges, 0, homes[il])
        for il, spec in enumerate(specs)
        if isinstance(spec, StateSpec)
    ]
    return with_cells(states, weight_nbytes, options)


def with_cells(states: Sequence[StatePlan], weight_nbytes: int, options: Options) -> list[StatePlan]:
    """Return the plans with cells for the slots of `options`."""
    n_own = options.n_slots * (1 + options.n_snapshots)
    n_rows = _row_cells(sum(state.cell_nbytes for state in states), weight_nbytes, options)
    n_undo = options.n_slots if options.speculation and not n_rows else 0
    return [replace(state, n_cells=n_own + n_undo + n_rows, n_row_cells=n_rows) for state in states]


def _row_cells(cell_nbytes: int, weight_nbytes: int, options: Options) -> int:
    """Return how many cells the rows of drafts need, or 0 for undo cells. Several nodes use undo cells,
    because steps of other slots may be in flight and would need cells as well."""
    if not options.speculation or any(options.nodes or ()):
        return 0
    most = options.draft_max
    n = max(min(n * most, MAX_VEC_ROWS - n) for n in range(1, min(options.n_slots, MAX_VEC_ROWS) + 1))
    return n if n <= options.n_slots or n * cell_nbytes <= ROW_STATES_SHARE * weight_nbytes else 0


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
        n_rows = self.plans[0].n_row_cells if self.plans else 0
        undoes = bool(options.speculation) and not n_rows
        self.slots = SlotStates(options.n_slots, options.n_snapshots, undoes, n_rows)

    def __bool__(self) -> bool:
        return bool(self.plans)


class SlotStates:
    """If `undoes` is set, a slot can go back to the beginning of its last run with a draft. With
    `n_row_cells`, a slot can go back to any row of this run until the slot has settled."""

    def __init__(self, n_slots: int, n_snapshots: int, undoes: bool = False, n_row_cells: int = 0) -> None:
        n_own = n_slots * (1 + undoes)
        n_kept = n_own + n_slots * n_snapshots
        self.n_cells = n_kept + n_row_cells
        self._free = list(range(n_kept - 1, n_own - 1, -1))
        self._row_cells = list(range(n_kept, self.n_cells))
        self._stores_rows = n_row_cells > 0
        # Each slot's states within its last run with a draft, as position -> cell.
        self._rows: list[dict[int, int]] = [{} for _ in range(n_slots)]
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
        known += self._rows[slot]
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
        if position in self._rows[slot]:
            return self._rows[slot][position]
        return self._snapshots[slot][position]

    def settle(self, slot: int, position: int) -> int:
        """Free the states after `position` of the slot's last run with a draft. Return the last position up
        to `position` at which the slot can continue."""
        rows = self._rows[slot]
        if (cell := rows.pop(position, None)) is not None:
            self._row_cells.append(self._cells[slot])
            self._cells[slot], self._positions[slot] = cell, position
        self._row_cells += rows.values()
        rows.clear()
        return self.resume_at(slot, position)

    def advance(self, run: Run) -> tuple[int, ...]:
        """Return the cells that the run reads and writes (`Run.states`)."""
        slot, at = run.slot, run.first_pos
        self.settle(slot, at)
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
        # Snapshots of drafts would replace the prompt's snapshot.
        is_long = run.n_rows > 1 and not run.undoes
        if read == self._cells[slot] and at:
            keeps = self._most and (is_long or self._was_long[slot]) and self._keep(slot, at)
            if run.undoes and not keeps and self._undo_cells:
                self._cells[slot], self._undo_cells[slot] = self._undo_cells[slot], read
                self._undo_positions[slot] = at
        self._positions[slot] = at + run.n_rows
        self._was_long[slot] = is_long
        if run.undoes and self._stores_rows:
            cells = [self._row_cells.pop() for _ in range(run.n_rows - 1)]
            self._rows[slot] = {at + 1 + i: cell for i, cell in enumerate(cells)}
            return read, *cells, self._cells[slot]
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
        if position < 0:
            self._row_cells += self._rows[slot].values()
            self._rows[slot].clear()
