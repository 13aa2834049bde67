"""Moves experts from host memory to their slots (expert_slots.py), while steps run.

A table per layer says which experts steps read from slots. A step never reads a slot that is being written,
because the table names the slot only after all devices have ended their copies. Experts that stay in the
model file are first copied to pinned memory (staged_experts.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from vkbackend.buffer import Buffer, View
from vkbackend.meta.expert_slots import column_nbytes, widths
from vkbackend.meta.slices import Load, expert_pieces
from vkbackend.meta.staged_experts import N_STAGED, StagedExperts
from vkbackend.meta.tensor import Inputs, SlotTable, Weight
from vkbackend.ops.expert_cache import NONE
from vkbackend.recording import Copy
from vkbackend.runtime import Device


@dataclass(frozen=True, slots=True)
class Move:
    """Copy a layer's expert to a slot, and replace the slot's expert."""

    layer: int
    slot: int
    expert: int


class ExpertSlots:
    """Moves experts to slots, and reads the router's counts. `resident[layer][slot]` is the expert that steps
    read from the slot, or -1 while the slot is empty or being written."""

    def __init__(
        self,
        devices: Sequence[Device],
        inputs: Sequence[Inputs],
        weights: Mapping[str, Weight],
        layers: Mapping[str, Sequence[Load]],
        tables: Mapping[str, SlotTable],
        max_ranges: Sequence[int],
        staged: StagedExperts | None = None,
    ) -> None:
        self._devices, self._inputs, self._staged = devices, inputs, staged
        self._here = [d for d, device in enumerate(devices) if not device.node]
        self.tables, self.names = list(tables.values()), list(tables)
        self.resident = [np.full(table.n_slots, -1, np.int64) for table in self.tables]
        self._stacks = [
            [_Stack(weights[load.name], load, max_ranges) for load in layers[prefix]] for prefix in tables
        ]
        self._moving: tuple[Move, ...] = ()
        self._copying: set[int] = set()  # devices
        self._is_staging = False
        self._words = [_host_words(inputs[d]) for d in self._here]
        counting = {next((d for d in self._here if stacks[0].width(d)), None) for stacks in self._stacks}
        self._counts = [
            (devices[d], view, _array(view).reshape(2, -1))
            for d in self._here
            if d in counting and (view := inputs[d].counts)
        ]
        for words, d in zip(self._words, self._here, strict=True):
            for table, stacks in zip(self.tables, self._stacks, strict=True):
                words[table.at : table.at + table.n_experts] = NONE
                empty = accumulate([stacks[0].width(d)] * table.n_slots, initial=0)
                starts = np.repeat(list(empty), table.strides[d])[: table.n_ids(d) + 1]
                words[table.starts_at : table.starts_at + len(starts)] = starts
        for _, _, counts in self._counts:
            counts[:] = 0

    @property
    def n_moving(self) -> int:
        return len(self._moving)

    def begin(self, moves: Sequence[Move]) -> None:
        """Empty the slots and start to copy. No step may be running. The previous moves must have ended."""
        assert not self._moving, "the previous moves have not ended"
        assert (
            len({(m.layer, m.slot) for m in moves}) == len({(m.layer, m.expert) for m in moves}) == len(moves)
        )
        for move in moves:
            assert move.expert not in self.resident[move.layer], f"{move} copies a resident expert"
            if (old := self.resident[move.layer][move.slot]) >= 0:
                self._set(move.layer, int(old), None)
            self.resident[move.layer][move.slot] = -1
        self._moving = tuple(moves)
        if self._staged and (experts := [self._expert(move) for move in moves if self._is_in_file(move)]):
            self._is_staging = True
            self._staged.begin(experts)
        else:
            self._begin_copies()

    def _begin_copies(self) -> None:
        for d in self._here:
            if copies := self.copies(d):
                self._copying.add(d)  # even if begin_copies fails, so that no table names the slots
                self._devices[d].begin_copies(copies)

    def at_once(self, moves: Sequence[Move]) -> list[Move]:
        """Return the first moves that may begin together. At most N_STAGED of them move experts from the
        file."""
        in_file = [move for move in moves if self._is_in_file(move)]
        return [move for move in moves if move not in in_file[N_STAGED:]]

    def _is_in_file(self, move: Move) -> bool:
        return self._staged is not None and self._staged.has(self.names[move.layer])

    def _expert(self, move: Move) -> tuple[str, int]:
        return self.names[move.layer], move.expert

    def copies(self, d: int) -> list[Copy]:
        copies: list[Copy] = []
        in_file = [move for move in self._moving if self._is_in_file(move)]
        for move in self._moving:
            stacks = self._stacks[move.layer]
            if not stacks[0].width(d):
                continue
            if self._staged and move in in_file:
                sources = self._staged.places(d, in_file.index(move), self.names[move.layer])
            else:
                sources = [stack.place(d, move.expert) for stack in stacks]
            for stack, source in zip(stacks, sources, strict=True):
                copies += stack.copies(d, move, *source)
        return copies

    def views(self, d: int) -> list[View]:
        """Return device `d`'s slots. Steps read only the parts that the tables name."""
        return [view for stacks in self._stacks for stack in stacks for view in stack.views(d)]

    def poll(self) -> int:
        """If all devices have the moved experts, let steps read them, and return the number of moves.
        Otherwise return 0. No step may be running."""
        if self._is_staging and self._staged:
            if not self._staged.ended():
                return 0
            self._is_staging = False
            self._begin_copies()
        self._copying = {d for d in self._copying if not self._devices[d].copies_ended()}
        if self._copying or not self._moving:
            return 0
        ended, self._moving = self._moving, ()
        for move in ended:
            self.resident[move.layer][move.slot] = move.expert
            self._set(move.layer, move.expert, move.slot)
        return len(ended)

    def _set(self, layer: int, expert: int, slot: int | None) -> None:
        table = self.tables[layer]
        for words, d in zip(self._words, self._here, strict=True):
            stride = table.strides[d]
            words[table.at + expert] = NONE if slot is None else stride * slot
            if slot is not None and stride == 2:
                # Id 2 * slot selects the expert's columns, and id 2 * slot + 1 the unused columns of the
                # slot.
                stack, at = self._stacks[layer][0], table.starts_at + 2 * slot
                words[at + 1] = words[at] + stack.widths[d][expert]

    @property
    def n_counts(self) -> int:
        return sum(table.n_counts for table in self.tables)

    def counts_of_experts(self, totals: np.ndarray) -> np.ndarray:
        """Return `totals` without the padding between layers, [experts of all layers]."""
        return np.concatenate([totals[t.counts_at : t.counts_at + t.n_experts] for t in self.tables])

    def take_counts(self, totals: np.ndarray, halves: bool = False) -> None:
        """Add the counts of the last step to `totals`, uint32 [n_counts], and clear them. The step may have
        computed its rows in two halves."""
        for device, view, counts in self._counts:
            device.invalidate(view.buffer)  # type: ignore[arg-type]
            for half in counts if halves else counts[:1]:
                np.add(totals, half, out=totals)
                half[:] = 0
            device.flush(view.buffer)  # type: ignore[arg-type]

    def faults(self) -> list[str]:
        """Return a message for every table entry whose slot is being written or holds another expert. Only
        checks use this, because it takes longer than `poll`."""
        faults = []
        for words, d in zip(self._words, self._here, strict=True):
            for layer, table in enumerate(self.tables):
                ids = words[table.at : table.at + table.n_experts]
                moving = {move.slot for move in self._moving if move.layer == layer}
                for expert in np.flatnonzero(ids != NONE):
                    slot = int(ids[expert]) // table.strides[d]
                    if slot in moving or self.resident[layer][slot] != expert:
                        faults.append(f"{self.names[layer]} expert {expert} is read from slot {slot} on {d}")
        return faults


class _Stack:
    """The addresses of a stack's experts in host memory and in slots."""

    def __init__(self, weight: Weight, load: Load, max_ranges: Sequence[int]) -> None:
        self._weight, self._column = weight, column_nbytes(load)
        self.widths = [widths(load, d) for d in range(len(max_ranges))]
        self._befores = [[0, *accumulate(of_device)] for of_device in self.widths]
        self._firsts = [
            [(first, first + count) for first, count, _ in expert_pieces(load, d, max_range)]
            for d, max_range in enumerate(max_ranges)
        ]

    def width(self, d: int) -> int:
        return max(self.widths[d])

    def views(self, d: int) -> list[View]:
        slots = self._weight.slots
        assert slots
        return [view for _, view in slots.pieces[d]]

    def place(self, d: int, expert: int) -> tuple[Buffer, int]:
        """Return (buffer, first byte) of an expert in host memory."""
        befores = self._befores[d]
        piece = next(i for i, (begin, end) in enumerate(self._firsts[d]) if begin <= expert < end)
        first, view = self._weight.pieces[d][piece]
        at = view.offset + int((befores[expert] - befores[first]) * self._column)
        return view.buffer, at  # type: ignore[return-value]

    def copies(self, d: int, move: Move, source: Buffer, at: int) -> list[Copy]:
        """Return the copy of an expert from byte `at` of `source`, or nothing if its slice is empty."""
        n_words = int(self.widths[d][move.expert] * self._column) // 4
        if not n_words:
            return []
        slots = self._weight.slots
        assert slots
        first, target = next(p for p in reversed(slots.pieces[d]) if p[0] <= move.slot)
        target_at = target.offset + int((move.slot - first) * self.width(d) * self._column)
        return [
            Copy(
                View(source, at, (n_words,), "u32"),
                View(target.buffer, target_at, (n_words,), "u32"),
                self._weight.name,
            )
        ]


def _host_words(inputs: Inputs) -> np.ndarray:
    view = inputs.experts
    assert view is not None
    at = inputs.host.offset + view.offset - inputs.device.offset
    return _array(View(inputs.host.buffer, at, view.shape, "u32"))


def _array(view: View) -> np.ndarray:
    host = view.buffer.host  # type: ignore[union-attr]
    return host[view.offset : view.end].view(np.uint32)[: math.prod(view.shape)]
