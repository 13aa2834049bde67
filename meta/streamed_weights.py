"""Assigns addresses in a device's pinned memory to weights that stay in the model file, and lists the bytes
to copy to these addresses (streams.py). Each device has two regions, and each region has room for any
layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Protocol

import numpy as np

from vkbackend.buffer import Home, View
from vkbackend.formats import block_of, row_nbytes
from vkbackend.memory import Packing, packed
from vkbackend.meta.slices import Load, expert_pieces, expert_slices, own_pieces, piece_nbytes, slices_of
from vkbackend.meta.split import Kind
from vkbackend.meta.tensor import Weight
from vkbackend.repeats import section_of
from vkbackend.runtime import Device

N_REGIONS = 2


class Source(Protocol):
    def data(self, name: str) -> np.ndarray:
        """Return the tensor in the mapped file as uint8. The rows must be in order; the shape may have any
        number of axes."""


Pair = tuple[np.ndarray, np.ndarray]  # (target, source), uint8 of equal shapes


def by_layer(loads: Sequence[Load]) -> dict[str, list[Load]]:
    """Return the streamed loads by layer ("blk.3"), in the order in which steps read them."""
    layers: dict[str, list[Load]] = {}
    for load in loads:
        if load.home is Home.STREAM:
            layers.setdefault(section_of(load.name), []).append(load)
    return layers


def n_regions(loads: Sequence[Load]) -> int:
    return min(N_REGIONS, len(by_layer(loads)))


def region_nbytes(loads: Sequence[Load], d: int, device: Device) -> list[int]:
    """Return the number of bytes of each chunk of a region of device `d`."""
    of_layers = [_packed(of_layer, d, device)[1].chunks for of_layer in by_layer(loads).values()]
    return [max(chunks) for chunks in zip_longest(*of_layers, fillvalue=0)]


def place_streamed(loads: Sequence[Load], d: int, device: Device, weights: Mapping[str, Weight]) -> None:
    """Add device `d`'s views to `weights`. Layer k of the streamed layers gets region k mod 2. Raises
    OutOfDeviceMemory."""
    chunks = region_nbytes(loads, d, device)
    regions = [
        [device.buffer(nbytes, Home.STREAM, f"from the file {r}.{i}") for i, nbytes in enumerate(chunks)]
        for r in range(n_regions(loads))
    ]
    for k, of_layer in enumerate(by_layer(loads).values()):
        wanted, packing = _packed(of_layer, d, device)
        for (load, first, shape), (chunk, offset) in zip(wanted, packing.places, strict=True):
            view = View(regions[k % N_REGIONS][chunk], offset, shape, load.dtype)
            weights[load.name].pieces[d].append((first, view))


def _packed(
    loads: Sequence[Load], d: int, device: Device
) -> tuple[list[tuple[Load, int, tuple[int, ...]]], Packing]:
    wanted = own_pieces(loads, d, piece_nbytes(device))
    views = [(shape, load.dtype) for load, _, shape in wanted]
    return wanted, packed(views, device.limits.max_allocation_nbytes)


def matrix_pairs(load: Load, d: int, pieces: Sequence[tuple[int, View]], raw: np.ndarray) -> Iterator[Pair]:
    """Yield (target, source) pairs that copy device `d`'s slice of a matrix or vector. `raw` has the tensor's
    bytes."""
    elements, nbytes = block_of(load.dtype)
    stored = raw.reshape(load.shape[0] if len(load.shape) > 1 else 1, -1)
    by_rows = load.state.kind is Kind.SPLIT and load.state.axis == len(load.shape) - 2
    for first, view in pieces:
        n_rows, width = (1, *view.shape)[-2:]
        end, at = first + n_rows, 0
        target = bytes_of(view, n_rows * row_nbytes(view.dtype, width)).reshape(n_rows, -1)
        for rows, columns in slices_of(load, d):
            part = stored[rows, columns.start // elements * nbytes : columns.stop // elements * nbytes]
            if by_rows:
                begin, stop = max(at, first), min(at + len(part), end)
                if begin < stop:
                    yield target[begin - first : stop - first], part[begin - at : stop - at]
                at += len(part)
            else:
                yield target[:, at : at + part.shape[1]], part[first:end]
                at += part.shape[1]


def expert_pairs(load: Load, d: int, weight: Weight, raw: np.ndarray, device: Device) -> list[list[Pair]]:
    """Return the (target, source) pairs of each expert of a stack."""
    pairs: list[list[Pair]] = [[] for _ in range(load.shape[0])]
    pieces = expert_pieces(load, d, piece_nbytes(device))
    for (first, count, _), (_, view) in zip(pieces, weight.pieces[d], strict=True):
        at = view.offset
        for e in range(first, first + count):
            source = expert_bytes(load, d, e, raw)
            if source.size:
                host = view.buffer.host  # type: ignore[union-attr]
                pairs[e].append((host[at : at + source.size].reshape(source.shape), source))
            at += source.size
    return pairs


def expert_bytes(load: Load, d: int, e: int, raw: np.ndarray) -> np.ndarray:
    """Return device `d`'s slice of an expert, uint8 [rows, bytes], as a view of the tensor's bytes `raw`."""
    elements, nbytes = block_of(load.dtype)
    rows, columns = expert_slices(load, d)[e]
    begin, end = columns.start // elements * nbytes, columns.stop // elements * nbytes
    return raw.reshape(*load.shape[:2], -1)[e, rows, begin:end]


def bytes_of(view: View, nbytes: int) -> np.ndarray:
    host: np.ndarray = view.buffer.host  # type: ignore[union-attr]
    return host[view.offset : view.offset + nbytes]
