"""Slice on load: each device gets its slice of every weight straight from the memory-mapped file.

Never a full host copy: a slice is a strided view of the file's bytes, copied once into device memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vkbackend.buffer import Buffer, Home, View
from vkbackend.errors import OutOfDeviceMemory, PlanError, UnsupportedFeature
from vkbackend.formats import block_of, row_nbytes
from vkbackend.memory import ALIGN, HostPages, allocate
from vkbackend.meta.split import Kind, State
from vkbackend.meta.tensor import Weight
from vkbackend.runtime import Device

Progress = Callable[[int, int], None]  # bytes done, bytes in all
PIECE_NBYTES = 64 << 20  # bytes copied between two progress reports


class Source(Protocol):
    """Where weights come from: raw bytes by name, as stored."""

    def data(self, name: str) -> np.ndarray:
        """uint8 bytes of a tensor, not copied."""


@dataclass(frozen=True, slots=True)
class Load:
    """One weight to load: where it comes from, its type and shape, and how it lies on the devices.

    `host` places it in pinned host memory that every device reads (embedding tables).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    state: State
    host: bool = False


def slice_of(load: Load, device: int) -> tuple[slice, slice]:
    """(rows, columns) that `device` holds, in elements; a vector counts as one row."""
    n_rows, n_columns = (1, *load.shape)[-2:]
    if load.state.kind is not Kind.SPLIT:
        return slice(0, n_rows), slice(0, n_columns)
    begin, end = load.state.ranges[device]
    if load.state.axis == len(load.shape) - 2:
        return slice(begin, end), slice(0, n_columns)
    block = block_of(load.dtype)[0]
    if begin % block or end % block:
        raise PlanError(f"{load.name}: columns {begin}:{end} cut {load.dtype} blocks of {block}")
    return slice(0, n_rows), slice(begin, end)


def piece_shapes(load: Load, device: int, max_range: int) -> list[tuple[int, tuple[int, ...]]]:
    """(first local row, shape) of the pieces of a device's slice: none exceeds what one binding may span."""
    rows, cols = slice_of(load, device)
    n_rows, n_cols = rows.stop - rows.start, cols.stop - cols.start
    if not n_rows or not n_cols:
        return []
    if len(load.shape) == 1:
        return [(0, (n_cols,))]
    per_piece = max_range // row_nbytes(load.dtype, n_cols)
    if not per_piece:
        raise PlanError(
            f"{load.name}: a row of {n_cols} {load.dtype} exceeds one binding of {max_range} bytes"
        )
    return [(at, (min(per_piece, n_rows - at), n_cols)) for at in range(0, n_rows, per_piece)]


def piece_nbytes(device: Device) -> int:
    """The largest piece: one binding spans it from any word on, and one allocation takes it.

    A binding begins at an aligned offset, so up to ALIGN bytes of it may lie before the piece.
    """
    return min(device.limits.max_storage_range, device.limits.max_allocation_nbytes) - ALIGN


def load_weights(
    devices: Sequence[Device], loads: Sequence[Load], source: Source, progress: Progress | None = None
) -> tuple[dict[str, Weight], list[HostPages]]:
    """Allocate and fill every weight; returns them by name, and the host pages that must outlive them."""
    shapes = {
        (load.name, d): piece_shapes(load, d, piece_nbytes(device))
        for load in loads
        for d, device in enumerate(devices)
    }
    weights: dict[str, Weight] = {}
    pages: list[HostPages] = []
    for load in loads:
        weights[load.name] = Weight(load.name, load.shape, load.dtype, load.state, [[] for _ in devices])
    for d, device in enumerate(devices):
        wanted = [
            (load, first, shape) for load in loads if not load.host for first, shape in shapes[load.name, d]
        ]
        views = allocate(device, [(shape, load.dtype) for load, _, shape in wanted], Home.WEIGHTS, "weights")
        for (load, first, _), view in zip(wanted, views, strict=True):
            weights[load.name].pieces[d].append((first, view))
    total = sum(view.nbytes for w in weights.values() for pieces in w.pieces for _, view in pieces)
    total += sum(source.data(load.name).nbytes for load in loads if load.host)
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress:
            progress(done, total)

    for load in loads:
        raw = source.data(load.name)
        if load.host:
            pages += _load_host(devices, load, weights[load.name], raw)
            advance(raw.nbytes)
            continue
        for d, device in enumerate(devices):
            _fill(device, load, d, weights[load.name].pieces[d], raw, advance)
    return weights, pages


def _fill(
    device: Device,
    load: Load,
    d: int,
    pieces: list[tuple[int, View]],
    raw: np.ndarray,
    advance: Callable[[int], None],
) -> None:
    elements, nbytes = block_of(load.dtype)
    rows, cols = slice_of(load, d)
    stored = raw.reshape(load.shape[0] if len(load.shape) > 1 else 1, -1)
    own = stored[rows, cols.start // elements * nbytes : cols.stop // elements * nbytes]
    for first, view in pieces:
        n_rows = view.shape[0] if len(view.shape) > 1 else 1
        row_bytes = own.shape[1]
        # Steps of whole rows whose byte count is a multiple of 4, so that each begins on a word.
        step = max(4, PIECE_NBYTES // max(1, row_bytes) // 4 * 4)
        for at in range(0, n_rows, step):
            part = own[first + at : first + min(at + step, n_rows)]
            words = -(-part.nbytes // 4)
            device.write(View(view.buffer, view.offset + at * row_bytes, (words,)), part)
            advance(part.nbytes)


def _load_host(devices: Sequence[Device], load: Load, weight: Weight, raw: np.ndarray) -> list[HostPages]:
    """One copy in pinned pages that all devices read; a device that cannot import them gets a host-visible
    copy."""
    align = max([4096, *(d.info.limits["host_import_align"] for d in devices if hasattr(d, "info"))])
    pages, imported = HostPages(raw.nbytes, align), False
    pages.bytes[: raw.nbytes] = raw
    for d, device in enumerate(devices):
        try:
            buffer: Buffer = device.import_pages(pages, load.name)
            imported = True
        except (UnsupportedFeature, OutOfDeviceMemory):
            buffer = device.buffer(raw.nbytes, Home.STAGING, load.name)
            np.asarray(buffer.host)[: raw.nbytes] = raw
            device.flush(buffer)
        # Pieces begin on whole rows and on words: 4 rows of any format are a multiple of 4 bytes.
        row_bytes = row_nbytes(load.dtype, load.shape[1])
        step = max(4, piece_nbytes(device) // row_bytes // 4 * 4)
        for first in range(0, load.shape[0], step):
            shape = (min(step, load.shape[0] - first), load.shape[1])
            weight.pieces[d].append((first, View(buffer, first * row_bytes, shape, load.dtype)))
    return [pages] if imported else []
