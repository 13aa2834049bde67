"""Copying what one slot holds into another, on the devices: K and V block by block, recurrent states cell by
cell. A slot is cheap to fork: nothing goes through the host.
"""

from __future__ import annotations

import numpy as np

from vkbackend.buffer import View
from vkbackend.meta.tensor import Weight
from vkbackend.models.runner import Runner
from vkbackend.models.state import SlotContent
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
        cells = CELL_BLOCK * table.table[[source, target], :n_blocks].astype(np.int64)
        for cache in (layer.k, layer.v):  # type: ignore[union-attr]
            for begin, other in cells.T:
                _copy(recordings, cache, int(begin), int(other), CELL_BLOCK)
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


def _copy(recordings: list[Recording], weight: Weight, begin: int, other: int, n: int) -> None:
    """Rows begin..begin+n of a weight to its rows from `other` on, on every device that holds a part."""
    for recording, pieces in zip(recordings, weight.pieces, strict=True):
        for _, view in pieces:
            recording.copy(_rows(view, begin, n), _rows(view, other, n), weight.name)


def _rows(view: View, begin: int, n: int) -> View:
    part = view.rows(begin, begin + n)
    return View(part.buffer, part.offset, (part.nbytes // 4,))
