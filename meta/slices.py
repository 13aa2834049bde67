"""Compute each device's slice of a weight and the slice's pieces, without allocating or copying."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from vkbackend.buffer import ALIGN, Home
from vkbackend.errors import PlanError
from vkbackend.formats import block_of, row_nbytes
from vkbackend.meta.split import MIRRORED, Kind, State
from vkbackend.runtime import Device


@dataclass(frozen=True, slots=True)
class Load:
    """A tensor to load. `home` is Home.WEIGHTS, or Home.HOST for a mirrored tensor that all devices read from
    pinned host memory. Each device has a copy of its own if the tensor is a stack of matrices. If `in_file`
    is set, the tensor begins at a word boundary, so devices can read it from a mapped file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    state: State
    home: Home = Home.WEIGHTS
    in_file: bool = False

    @property
    def shared(self) -> bool:
        return self.home is Home.HOST and self.state.kind is not Kind.SPLIT and len(self.shape) < 3


def expert_slices(load: Load, device: int) -> tuple[tuple[slice, slice], ...]:
    """Return (rows, columns) of each expert's slice of [n_expert, n_out, n_in], in elements."""
    try:
        return _expert_slices(_nameless(load), device)
    except PlanError:
        return _expert_slices(load, device)  # names the tensor


def _nameless(load: Load) -> Load:
    """Return a cache key that most layers share."""
    return replace(load, name="", home=Home.WEIGHTS, in_file=False)


@lru_cache(512)
def _expert_slices(load: Load, device: int) -> tuple[tuple[slice, slice], ...]:
    experts = load.state.experts or (load.state.ranges,) * load.shape[0]
    slices = []
    for ranges in experts:
        expert = Load(load.name, load.shape[1:], load.dtype, State(Kind.SPLIT, load.state.axis - 1, ranges))
        slices.append(
            slice_of(expert if load.state.kind is Kind.SPLIT else replace(expert, state=MIRRORED), device)
        )
    return tuple(slices)


def slice_of(load: Load, device: int) -> tuple[slice, slice]:
    """Return (rows, columns) of the slice in elements. A vector is one row."""
    [held] = slices_of(load, device)
    return held


def slices_of(load: Load, device: int) -> list[tuple[slice, slice]]:
    """Return (rows, columns) on `device` of each segment of the split axis. Segments of rows are stored in
    sequence. Segments of columns are adjacent in every row."""
    n_rows, n_columns = (1, *load.shape)[-2:]
    if load.state.kind is not Kind.SPLIT:
        return [(slice(0, n_rows), slice(0, n_columns))]
    held = load.state.slices(device)
    if load.state.axis == len(load.shape) - 2:
        return [(rows, slice(0, n_columns)) for rows in held]
    block = block_of(load.dtype)[0]
    for columns in held:
        if columns.start % block or columns.stop % block:
            raise PlanError(
                f"{load.name}: columns {columns.start}:{columns.stop} cut {load.dtype} blocks of {block}"
            )
    return [(slice(0, n_rows), columns) for columns in held]


def shape_of(load: Load, device: int) -> tuple[int, int]:
    held = slices_of(load, device)
    by_rows = load.state.kind is Kind.SPLIT and load.state.axis == len(load.shape) - 2
    n_rows, n_columns = ([s[i].stop - s[i].start for s in held] for i in range(2))
    return (sum(n_rows), n_columns[0]) if by_rows else (n_rows[0], sum(n_columns))


def piece_shapes(load: Load, device: int, max_range: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return (first local row, shape) of each piece of a slice. A piece has at most `max_range` bytes."""
    if len(load.shape) == 3:
        return [(first, shape) for first, _, shape in expert_pieces(load, device, max_range)]
    n_rows, n_cols = shape_of(load, device)
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


def own_pieces(loads: Iterable[Load], device: int, max_range: int) -> list[tuple[Load, int, tuple[int, ...]]]:
    """Return (load, first local row, shape) of all pieces of unshared loads."""
    return [
        (load, first, shape)
        for load in loads
        if not load.shared
        for first, shape in piece_shapes(load, device, max_range)
    ]


def mapped_pieces(load: Load, d: int, device: Device) -> list[tuple[int, tuple[int, ...], int]]:
    """Return (first local row, shape, first byte in the tensor) of the pieces that device `d` reads from the
    file. The slice must be contiguous, with pieces at word boundaries."""
    run = run_of(load, d) if load.in_file and device.maps_files else None
    if run is None:
        return []
    pieces, at = [], run[0]
    for first, shape in piece_shapes(load, d, piece_nbytes(device)):
        pieces.append((first, shape, at))
        at += math.prod(shape[:-1]) * row_nbytes(load.dtype, shape[-1])
    return [] if any(at % 4 for _, _, at in pieces) else pieces


def run_of(load: Load, device: int) -> tuple[int, int] | None:
    """Return (begin, end) in the tensor's bytes of a contiguous slice, otherwise None."""
    n_out, n_in = (1, *load.shape)[-2:]
    row_bytes, (elements, nbytes) = row_nbytes(load.dtype, n_in), block_of(load.dtype)
    cuts = expert_slices(load, device) if len(load.shape) == 3 else slices_of(load, device)
    run: tuple[int, int] | None = None
    for i, (rows, columns) in enumerate(cuts):
        if rows.start == rows.stop or columns.start == columns.stop:
            continue
        if rows.stop - rows.start > 1 and columns != slice(0, n_in):
            return None
        above = i * n_out if len(load.shape) == 3 else 0
        begin = (above + rows.start) * row_bytes + columns.start // elements * nbytes
        if run and begin != run[1]:
            return None
        end = (above + rows.stop - 1) * row_bytes + columns.stop // elements * nbytes
        run = run[0] if run else begin, end
    return run


def rows_in_pieces(load: Load, max_range: int) -> list[tuple[int, tuple[int, ...]]]:
    """Return (first row, shape) of each piece of a complete table. All pieces but the last have a multiple of
    four rows, so that they end at word boundaries in any format."""
    if len(load.shape) == 1:
        return [(0, load.shape)]
    n_rows, width = load.shape
    step = max(4, max_range // row_nbytes(load.dtype, width) // 4 * 4)
    return [(first, (min(step, n_rows - first), width)) for first in range(0, n_rows, step)]


def expert_pieces(load: Load, device: int, max_range: int) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return (first expert, number of experts, shape) of each piece of a stack. The shape is [rows of the
    piece's experts, n_in]. If the stack is split by columns, the shape is [n_out, columns of the piece's
    experts]."""
    try:
        return list(_expert_pieces(_nameless(load), device, max_range))
    except PlanError:
        # names the tensor
        return list(_expert_pieces(load, device, max_range))


@lru_cache(512)
def _expert_pieces(load: Load, device: int, max_range: int) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    slices = expert_slices(load, device)
    sizes = [(r.stop - r.start) * (c.stop - c.start) for r, c in slices]
    if not sum(sizes):
        return ()
    elements, nbytes = block_of(load.dtype)
    if max(sizes) // elements * nbytes > max_range:
        raise PlanError(f"{load.name}: one expert exceeds one binding of {max_range} bytes")
    by_columns = load.state.kind is Kind.SPLIT and load.state.axis == 2
    pieces: list[tuple[int, int, tuple[int, ...]]] = []
    first = 0
    while first < len(sizes):
        count, total = 0, 0
        while first + count < len(sizes) and (total + sizes[first + count]) // elements * nbytes <= max_range:
            total += sizes[first + count]
            count += 1
        n_out, n_in = load.shape[1:]
        shape = (n_out, total // n_out) if by_columns else (total // n_in, n_in)
        pieces.append((first, count, shape))
        first += count
    return tuple(pieces)


def piece_nbytes(device: Device) -> int:
    """Return the maximum bytes of a piece, so that it fits a binding and an allocation. A binding begins at
    an aligned offset, up to ALIGN bytes before the piece."""
    return min(device.limits.max_storage_range, device.limits.max_allocation_nbytes) - ALIGN
