"""Copies blocks of K, V and index keys, and recurrent states, without the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vkbackend.buffer import View
from vkbackend.meta.tensor import Weight
from vkbackend.models.engine.cache.blocks import Copy
from vkbackend.models.placement.kv_cache import KVCache
from vkbackend.recording import Recording
from vkbackend.runtime import Device


def copy_blocks(devices: Sequence[Device], kv: KVCache, copies: Sequence[Copy]) -> None:
    recordings = [Recording("copy blocks") for _ in devices]
    for group, table in enumerate(kv.groups):
        pairs = [(copy.source, copy.target) for copy in copies if copy.group == group]
        for part in kv.parts if table and pairs else ():
            if part.table is table:
                n_cells, first = part.n_cells, part.first
                for begin, other, n in _runs(np.array(pairs).T):
                    cells = first + n_cells * begin, first + n_cells * other, n_cells * n
                    _copy(recordings, part.array, *cells)
    _run(devices, recordings)


def copy_state(devices: Sequence[Device], kv: KVCache, source: int, target: int, n_stored: int) -> None:
    """Copy the recurrent state that follows `n_stored` positions, but not its snapshots."""
    states = kv.states
    if not states or not n_stored:
        return
    recordings = [Recording(f"state of slot {source} to {target}") for _ in devices]
    begin, other = states.slots.cell(source, n_stored), states.slots.put(target, n_stored)
    for state in states.layers.values():
        for weight in state.arrays.values():
            _copy(recordings, weight, begin, other, 1)
    _run(devices, recordings)


def _run(devices: Sequence[Device], recordings: Sequence[Recording]) -> None:
    for device, recording in zip(devices, recordings, strict=True):
        if recording.commands:
            device.run(recording)


def _runs(blocks: np.ndarray) -> list[tuple[int, int, int]]:
    """Merge copies of consecutive blocks. `blocks` [2, n] lists sources and targets. Return (first source,
    first target, count) of each merged copy. In a long context, a barrier for each block would take minutes.
    """
    breaks = np.flatnonzero((np.diff(blocks) != 1).any(axis=0)) + 1
    return [(int(run[0, 0]), int(run[1, 0]), run.shape[1]) for run in np.split(blocks, breaks, axis=1)]


def _copy(recordings: list[Recording], weight: Weight, begin: int, other: int, n: int) -> None:
    for recording, pieces in zip(recordings, weight.pieces, strict=True):
        for _, view in pieces:
            recording.copy(_rows(view, begin, n), _rows(view, other, n), weight.name)


def _rows(view: View, begin: int, n: int) -> View:
    part = view.rows(begin, begin + n)
    return View(part.buffer, part.offset, (part.nbytes // 4,))
