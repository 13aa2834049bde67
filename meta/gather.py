"""Join a tensor from the devices' slices, and write rows to slices. No step may be running."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from vkbackend.buffer import View
from vkbackend.errors import PlanError
from vkbackend.formats import block_of, row_nbytes
from vkbackend.meta.slices import Load, expert_slices, slices_of
from vkbackend.meta.tensor import Weight
from vkbackend.runtime import Device

PIECE_NBYTES = 16 << 20  # half of the upload buffer


@dataclass(frozen=True, slots=True)
class Extent:
    """A rectangle of a stored tensor, as a matrix of bytes. On the device, the rectangle begins at byte
    `offset` of `view`. Its rows are `pitch` bytes apart, or contiguous if `pitch` is 0."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    view: View
    offset: int = 0
    pitch: int = 0


def matrix_of(weight: Weight) -> tuple[int, int]:
    """Return (rows, bytes per row) of a stored tensor. A stack contains all experts' rows."""
    return math.prod(weight.shape[:-1]), row_nbytes(weight.dtype, weight.shape[-1])


def extents(weight: Weight, device: int) -> list[Extent]:
    pieces = weight.pieces[device]
    load = Load(weight.name, weight.shape, weight.dtype, weight.state)
    elements, nbytes = block_of(weight.dtype)

    def stored(columns: slice) -> tuple[int, int]:
        return columns.start // elements * nbytes, columns.stop // elements * nbytes

    if len(weight.shape) < 3:
        return _rectangles(slices_of(load, device), stored, pieces)
    held, n_out = [], weight.shape[1]
    ends = [*(first for first, _ in pieces[1:]), weight.shape[0]]
    for (first, view), end in zip(pieces, ends[: len(pieces)], strict=True):
        offset = 0
        for e, (rows, columns) in list(enumerate(expert_slices(load, device)))[first:end]:
            begin, stop = stored(columns)
            held.append(Extent((e * n_out + rows.start, e * n_out + rows.stop), (begin, stop), view, offset))
            offset += (rows.stop - rows.start) * (stop - begin)
    return held


def _rectangles(
    cuts: list[tuple[slice, slice]],
    stored: Callable[[slice], tuple[int, int]],
    pieces: list[tuple[int, View]],
) -> list[Extent]:
    """Return the extents of `cuts`, the rectangles of a matrix that a device holds. `pieces` lists (first
    local row, view)."""
    held = []
    by_columns = len(cuts) > 1 and cuts[0][0] == cuts[1][0]
    pitch = sum(end - begin for begin, end in (stored(columns) for _, columns in cuts)) if by_columns else 0
    row = lead = 0
    for rows, columns in cuts:
        begin, end = stored(columns)
        for first, view in pieces:
            n_rows = math.prod(view.shape[:-1])
            low, high = max(row, first), min(row + rows.stop - rows.start, first + n_rows)
            if low < high:
                stored_rows = rows.start + low - row, rows.start + high - row
                offset = (low - first) * (pitch or end - begin) + lead
                held.append(Extent(stored_rows, (begin, end), view, offset, pitch))
        if by_columns:
            lead += end - begin
        else:
            row += rows.stop - rows.start
    return held


def gather_rows(devices: Sequence[Device], weight: Weight, begin: int, end: int) -> np.ndarray:
    """Return stored rows begin..end, uint8 [end - begin, row bytes]. Each byte is from the first device that
    holds it. Raises PlanError if no device holds a byte."""
    return gather_many(devices, [(weight, begin, end)])[0]


def gather_many(devices: Sequence[Device], wanted: Sequence[tuple[Weight, int, int]]) -> list[np.ndarray]:
    """Return `gather_rows` for each (tensor, begin, end). Each device is read once."""
    outs = [np.empty((end - begin, matrix_of(weight)[1]), np.uint8) for weight, begin, end in wanted]
    missing = [np.ones(out.shape, bool) for out in outs]
    held: dict[str, list[Extent]] = {}
    for d, device in enumerate(devices):
        held.clear()
        reads = []
        for i, (weight, begin, end) in enumerate(wanted):
            if weight.name not in held:
                held[weight.name] = extents(weight, d)
            for extent in held[weight.name]:
                low, high = max(begin, extent.rows[0]), min(end, extent.rows[1])
                window = slice(low - begin, max(low, high) - begin), slice(*extent.columns)
                if missing[i][window].any():
                    reads.append((i, window, extent, low, high))
        parts = _read_rows(device, [read[2:] for read in reads])
        for (i, window, *_), part in zip(reads, parts, strict=True):
            np.copyto(outs[i][window], part, where=missing[i][window])
            missing[i][window] = False
    for (weight, begin, end), lacking in zip(wanted, missing, strict=True):
        if lacking.any():
            raise PlanError(f"no device holds all of rows {begin}:{end} of {weight.name}, {weight.state}")
    return outs


def scatter_rows(devices: Sequence[Device], weight: Weight, begin: int, data: np.ndarray) -> None:
    """Write `data`, uint8 [n, row bytes], to stored rows begin..begin + n on each device that holds bytes of
    these rows."""
    scatter_many(devices, [(weight, begin, data)])


def scatter_many(devices: Sequence[Device], rows: Sequence[tuple[Weight, int, np.ndarray]]) -> None:
    """Call `scatter_rows` for each (tensor, begin, data). Each device is written once."""
    held: dict[str, list[Extent]] = {}
    for d, device in enumerate(devices):
        held.clear()
        parts: list[tuple[View, np.ndarray]] = []
        for weight, begin, data in rows:
            if weight.name not in held:
                held[weight.name] = extents(weight, d)
            for extent in held[weight.name]:
                parts += _parts(device, extent, begin, data)
        device.write_many(parts)


def _parts(device: Device, extent: Extent, begin: int, data: np.ndarray) -> Iterator[tuple[View, np.ndarray]]:
    """Yield the device's views of an extent, with the bytes to write."""
    low, high = max(begin, extent.rows[0]), min(begin + len(data), extent.rows[1])
    wide = extent.columns[1] - extent.columns[0]
    if low < high and wide:
        part = data[low - begin : high - begin, slice(*extent.columns)]
        pitch = extent.pitch or wide
        at = extent.offset + (low - extent.rows[0]) * pitch
        if pitch == wide:
            yield from _target(device, extent.view, at, part)
            return
        for row, line in enumerate(part):
            yield from _target(device, extent.view, at + row * pitch, line)


def stream(devices: Sequence[Device], weight: Weight) -> Iterator[np.ndarray]:
    n_rows, row_bytes = matrix_of(weight)
    step = max(1, PIECE_NBYTES // row_bytes)
    for begin in range(0, n_rows, step):
        yield gather_rows(devices, weight, begin, min(begin + step, n_rows))


def gather(devices: Sequence[Device], weight: Weight) -> np.ndarray:
    """Return the tensor's bytes as a file stores them, uint8 [bytes]."""
    return np.concatenate([piece.reshape(-1) for piece in stream(devices, weight)])


@contextmanager
def transfers(devices: Sequence[Device]) -> Iterator[Sequence[Device]]:
    """Yield the devices, and free their transfer buffers at the end."""
    try:
        yield devices
    finally:
        for device in devices:
            device.drop_upload()


# ---- reads and writes at any byte offset; views begin at word boundaries ----


def _read_rows(device: Device, reads: Sequence[tuple[Extent, int, int]]) -> list[np.ndarray]:
    """Return rows low..high of each extent."""
    views, shapes = [], []
    for extent, low, high in reads:
        wide = extent.columns[1] - extent.columns[0]
        pitch, n = extent.pitch or wide, high - low
        at = extent.offset + (low - extent.rows[0]) * pitch
        lead, nbytes = at % 4, (n - 1) * pitch + wide
        words = -(-(lead + nbytes) // 4)
        views.append(View(extent.view.buffer, extent.view.offset + at - lead, (words,), "u32"))
        shapes.append((lead, n, wide, pitch))
    return [
        np.lib.stride_tricks.as_strided(raw[lead:], (n, wide), (pitch, 1))
        for raw, (lead, n, wide, pitch) in zip(device.read_many(views), shapes, strict=True)
    ]


def _target(device: Device, view: View, at: int, data: np.ndarray) -> Iterator[tuple[View, np.ndarray]]:
    """Yield the view and the bytes to write at byte `at`. If `at` is inside a word, yield nothing and write
    at once, because the word's other bytes must be read first."""
    if lead := at % 4:
        data = np.concatenate([_read(device, view, at - lead, lead), data.reshape(-1)])
    target = View(view.buffer, view.offset + at - lead, (-(-data.nbytes // 4),), "u32")
    if lead:
        device.write(target, np.ascontiguousarray(data))
    else:
        yield target, np.ascontiguousarray(data)


def _read(device: Device, view: View, at: int, nbytes: int) -> np.ndarray:
    return device.read(View(view.buffer, view.offset + at, (-(-nbytes // 4),), "u32"))[:nbytes]
