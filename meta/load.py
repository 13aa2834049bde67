"""Copy each device's slice of every weight from the mapped file, without a complete host copy.

A slice is a strided view of the file, or it is joined from parts of a fused tensor. If possible, devices that
run on the host read the file's pages instead (mapped.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from vkbackend.buffer import Home, View
from vkbackend.errors import OutOfDeviceMemory, UnsupportedFeature
from vkbackend.formats import block_of, row_nbytes
from vkbackend.host_copy import copy_into, touch
from vkbackend.memory import allocate
from vkbackend.meta.known_speed import known_host_kind
from vkbackend.meta.mapped import map_weights
from vkbackend.meta.slices import (
    Load,
    expert_pieces,
    expert_slices,
    own_pieces,
    piece_nbytes,
    rows_in_pieces,
    slices_of,
)
from vkbackend.meta.streamed_weights import place_streamed
from vkbackend.meta.tensor import Weight
from vkbackend.pages import FilePages, HostPages, Pages
from vkbackend.runtime import Device

Progress = Callable[[int, int], None]  # The arguments are (bytes done, bytes in total).
PIECE_NBYTES = 64 << 20  # Bytes between two calls of `progress`.


class Source(Protocol):
    def data(self, name: str) -> np.ndarray:
        """Return the tensor as uint8 without a copy. The rows must be in order; the shape may have any number
        of axes."""

    def file(self, name: str) -> tuple[np.ndarray, int]:
        """Return the mapped file as uint8, and the tensor's first byte. Only loads with `in_file` call this
        function."""


def load_weights(
    devices: Sequence[Device], loads: Sequence[Load], source: Source, progress: Progress | None = None
) -> tuple[dict[str, Weight], list[Pages]]:
    """Return all weights, and host pages that must outlive them. Streamed weights get memory but no values
    (streams.py)."""
    weights = {
        load.name: Weight(
            load.name,
            load.shape,
            load.dtype,
            load.state,
            [[] for _ in devices],
            streamed=load.home is Home.STREAM,
        )
        for load in loads
    }
    pages: list[Pages] = []
    for d, device in enumerate(devices):
        device.host_kind = known_host_kind(device)
        pages += _place(device, d, loads, source, weights)
        place_streamed(loads, d, device, weights)
        device.host_kind = ""
    here = [d for d, device in enumerate(devices) if not device.node]
    loaded = [w for w in weights.values() if not w.streamed]
    total = sum(view.nbytes for w in loaded for d in here for _, view in w.pieces[d])
    to_share = [load for load in loads if load.shared and not all(weights[load.name].pieces[d] for d in here)]
    total += sum(source.data(load.name).nbytes for load in to_share)
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress:
            progress(done, total)

    for load in loads:
        weight, raw = weights[load.name], source.data(load.name)
        for d, device in enumerate(devices):
            if _is_mapped(weight.pieces[d]):
                _touch(weight.pieces[d], advance)
            elif device.node:
                if load.shared:
                    weight.pieces[d] += _copies(device, load)
            elif load.shared:
                continue
            elif weight.streamed:
                pass
            elif len(load.shape) == 3:
                _fill_experts(device, load, d, weight, raw, advance)
            else:
                _fill(device, load, d, weight.pieces[d], raw, advance)
            if len(load.shape) == 3 and weight.pieces[d]:
                weight.starts[d] = _starts(device, load, d)
        if load in to_share:
            pages += _load_shared(devices, load, weight, raw)
            advance(raw.nbytes)
    return weights, pages


def _place(
    device: Device, d: int, loads: Sequence[Load], source: Source, weights: Mapping[str, Weight]
) -> list[FilePages]:
    """Add device `d`'s views to `weights`, except for shared tables and streamed weights. Returns the
    file pages that the device reads."""
    in_file = [load for load in loads if load.in_file]
    pages = map_weights(device, d, in_file, source.file, weights) if in_file else []
    rest = [load for load in loads if not weights[load.name].pieces[d]]
    for home in (Home.WEIGHTS, Home.HOST):
        wanted = own_pieces([load for load in rest if load.home is home], d, piece_nbytes(device))
        views = allocate(device, [(shape, load.dtype) for load, _, shape in wanted], home, home.value)
        for (load, first, _), view in zip(wanted, views, strict=True):
            weights[load.name].pieces[d].append((first, view))
    return pages


def _is_mapped(pieces: Sequence[tuple[int, View]]) -> bool:
    return any(view.buffer.home is Home.MAPPED for _, view in pieces)  # type: ignore[union-attr]


def _fill(
    device: Device,
    load: Load,
    d: int,
    pieces: list[tuple[int, View]],
    raw: np.ndarray,
    advance: Callable[[int], None],
) -> None:
    elements, nbytes = block_of(load.dtype)
    stored = raw.reshape(load.shape[0] if len(load.shape) > 1 else 1, -1)
    parts = [
        stored[rows, cols.start // elements * nbytes : cols.stop // elements * nbytes]
        for rows, cols in slices_of(load, d)
    ]
    by_rows = load.state.axis == len(load.shape) - 2
    joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=0 if by_rows else 1)
    for first, view in pieces:
        n_rows = view.shape[0] if len(view.shape) > 1 else 1
        row_bytes = joined.shape[1]
        # With a multiple of 4 rows, every write begins at a word boundary.
        step = max(4, PIECE_NBYTES // max(1, row_bytes) // 4 * 4)
        for at in range(0, n_rows, step):
            part = joined[first + at : first + min(at + step, n_rows)]
            words = -(-part.nbytes // 4)
            device.write(View(view.buffer, view.offset + at * row_bytes, (words,)), part)
            advance(part.nbytes)


def _touch(pieces: Sequence[tuple[int, View]], advance: Callable[[int], None]) -> None:
    for _, view in pieces:
        held = view.buffer.host[view.offset : view.end]  # type: ignore[union-attr]
        for at in range(0, held.size, PIECE_NBYTES):
            part = held[at : at + PIECE_NBYTES]
            touch(part)
            advance(part.size)


def _fill_experts(
    device: Device, load: Load, d: int, weight: Weight, raw: np.ndarray, advance: Callable[[int], None]
) -> None:
    elements, nbytes = block_of(load.dtype)
    stored = raw.reshape(*load.shape[:2], -1)
    slices = expert_slices(load, d)

    def matrices(first: int, count: int) -> Iterator[np.ndarray]:
        for e in range(first, first + count):
            rows, cols = slices[e]
            yield stored[e, rows, cols.start // elements * nbytes : cols.stop // elements * nbytes].reshape(
                -1
            )

    for (first, count, _), (_, view) in zip(
        expert_pieces(load, d, piece_nbytes(device)), weight.pieces[d], strict=True
    ):
        offset = view.offset
        for part in _words(matrices(first, count)):
            device.write(View(view.buffer, offset, (-(-part.nbytes // 4),)), part)
            offset += part.nbytes
            advance(part.nbytes)


def _starts(device: Device, load: Load, d: int) -> View:
    """Store the prefix sums of the experts' FFN columns, u32 [n_expert + 1]."""
    by_columns = load.state.axis == 2
    held = [cut[by_columns].stop - cut[by_columns].start for cut in expert_slices(load, d)]
    starts = np.concatenate([[0], np.cumsum(held)]).astype(np.uint32)
    view = View(device.buffer(starts.nbytes, Home.WEIGHTS, f"{load.name} starts"), 0, starts.shape, "u32")
    device.write(view, starts)
    return view


def _words(parts: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    """Regroup the arrays into complete 32-bit words. Only the last array may end with an incomplete word."""
    rest = np.empty(0, np.uint8)
    for part in parts:
        joined = np.concatenate([rest, part]) if rest.size else part
        whole = joined.size // 4 * 4
        if whole:
            yield joined[:whole]
        rest = joined[whole:]
    if rest.size:
        yield rest


def _load_shared(devices: Sequence[Device], load: Load, weight: Weight, raw: np.ndarray) -> list[HostPages]:
    """Copy a table to pinned pages for the devices that do not read it from the file. A device that cannot
    import the pages gets a host-visible copy."""
    align = max(device.limits.host_import_align for device in devices)
    pages, imported = HostPages(raw.nbytes, align), False
    raw = raw.reshape(-1)
    copy_into(pages.bytes[: raw.nbytes], raw)
    for d, device in enumerate(devices):
        if weight.pieces[d]:
            continue
        row_bytes = row_nbytes(load.dtype, load.shape[-1])
        try:
            buffer = device.import_pages(pages, load.name)
            imported = True
            for first, shape in rows_in_pieces(load, piece_nbytes(device)):
                weight.pieces[d].append((first, View(buffer, first * row_bytes, shape, load.dtype)))
        except (UnsupportedFeature, OutOfDeviceMemory):
            weight.pieces[d] += _copies(device, load)
            for first, view in weight.pieces[d]:
                part = raw[first * row_bytes :][: view.nbytes]
                device.write(View(view.buffer, view.offset, (view.nbytes // 4,), "u32"), part)
    return [pages] if imported else []


def _copies(device: Device, load: Load) -> list[tuple[int, View]]:
    firsts, shapes = zip(*rows_in_pieces(load, piece_nbytes(device)), strict=True)
    views = allocate(device, [(shape, load.dtype) for shape in shapes], Home.HOST, load.name)
    return list(zip(firsts, views, strict=True))
