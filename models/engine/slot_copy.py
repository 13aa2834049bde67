"""Copying what one slot holds into another, on the devices: K and V, and recurrent states. A slot is cheap
to fork: nothing goes through the host.
"""

from __future__ import annotations

import numpy as np

from vkbackend.buffer import View
from vkbackend.meta.tensor import Weight
from vkbackend.models.engine.runner import Runner
from vkbackend.models.engine.saved_state import SlotContent
from vkbackend.ops import CELL_BLOCK
from vkbackend.recording import Recording


def copy_slot(runner: Runner, source: int, content: SlotContent, target: int) -> SlotContent:
    """Put what slot `source` holds, its `content`, into slot `target`; returns what that then holds.

    Of the snapshots of recurrent layers only the newest state is copied. Raises what devices raise.
    """
    devices = runner.mesh.devices
    recordings = [Recording(f"slot {source} to {target}") for _ in devices]
    n_stored, kv = content.n_stored, runner.kv
    for plan in kv.plans if n_stored else ():
        layer, table = kv.layers[plan.layer], kv.tables[plan.blocks]
        n_blocks = min(-(-n_stored // CELL_BLOCK), table.table.shape[1])
        runs = _runs(table.table[[source, target], :n_blocks].astype(np.int64))
        for cache in (layer.k, layer.v):  # type: ignore[union-attr]
            for begin, other, n in runs:
                _copy(recordings, cache, CELL_BLOCK * begin, CELL_BLOCK * other, CELL_BLOCK * n)
    if kv.states and n_stored:
        begin = kv.states.slots.cell(source, n_stored)
        other = kv.states.slots.put(target, n_stored)
        for state in kv.states.layers.values():
            for weight in state.arrays.values():
                _copy(recordings, weight, begin, other, 1)
    for device, recording in zip(devices, recordings, strict=True):
        if recording.commands:
            device.run(recording)
    resumable = n_stored if kv.states else content.resumable
    return SlotContent(list(content.tokens), n_stored, resumable)


def _runs(blocks: np.ndarray) -> list[tuple[int, int, int]]:
    """(first block of the source, of the target, how many) of blocks [2, n] that follow each other in both: a
    copy for each block of a long context would make a recording whose barriers take minutes to derive."""
    breaks = np.flatnonzero((np.diff(blocks) != 1).any(axis=0)) + 1
    return [(int(run[0, 0]), int(run[1, 0]), run.shape[1]) for run in np.split(blocks, breaks, axis=1)]


def _copy(recordings: list[Recording], weight: Weight, begin: int, other: int, n: int) -> None:
    """Rows begin..begin+n of a weight to its rows from `other` on, on every device that holds a part."""
    for recording, pieces in zip(recordings, weight.pieces, strict=True):
        for _, view in pieces:
            recording.copy(_rows(view, begin, n), _rows(view, other, n), weight.name)


def _rows(view: View, begin: int, n: int) -> View:
    part = view.rows(begin, begin + n)
    return View(part.buffer, part.offset, (part.nbytes // 4,))
