"""Let devices that run on the host read weights from the model file's pages (docs/measurements/lavapipe.md).

The file must not change while it is mapped, because the operating system may drop pages and read them again.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vkbackend import env
from vkbackend.buffer import Buffer, View, aligned
from vkbackend.errors import OutOfDeviceMemory, UnsupportedFeature
from vkbackend.formats import row_nbytes
from vkbackend.meta.slices import Load, mapped_pieces
from vkbackend.meta.tensor import Weight
from vkbackend.pages import FilePages
from vkbackend.runtime import Device


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a weight at byte `begin` of `file` (uint8 [bytes])."""

    load: Load
    first: int
    shape: tuple[int, ...]
    file: np.ndarray
    begin: int

    @property
    def end(self) -> int:
        *rows, width = self.shape
        return self.begin + aligned(math.prod(rows) * row_nbytes(self.load.dtype, width), 4)


def map_weights(
    device: Device,
    d: int,
    loads: Sequence[Load],
    file_of: Callable[[str], tuple[np.ndarray, int]],
    weights: Mapping[str, Weight],
) -> list[FilePages]:
    """Add to `weights` the pieces that device `d` reads from the file. Returns the pages, which must outlive
    the device. The list is empty if the device cannot import pages."""
    pieces: list[Piece] = []
    for load in loads:
        if places := mapped_pieces(load, d, device):
            file, begin = file_of(load.name)
            pieces += [Piece(load, first, shape, file, begin + at) for first, shape, at in places]
    pages: list[FilePages] = []
    buffers: list[Buffer] = []
    views: list[tuple[Piece, View]] = []
    try:
        for window in windows(pieces, device.limits.max_allocation_nbytes):
            begin, end = window[0].begin, max(piece.end for piece in window)
            pages.append(FilePages(window[0].file, begin, end))
            buffers.append(device.import_pages(pages[-1], f"file[{len(buffers)}]"))
            lead = pages[-1].lead - begin
            views += [(p, View(buffers[-1], lead + p.begin, p.shape, p.load.dtype)) for p in window]
    except (UnsupportedFeature, OutOfDeviceMemory) as error:
        env.log(1, f"{device.name} cannot read the model's file in place and copies it: {error}")
        device.maps_files = False
        for buffer in buffers:
            device.free(buffer)
        return []
    for piece, view in views:
        weights[piece.load.name].pieces[d].append((piece.first, view))
    return pages


def windows(pieces: Iterable[Piece], limit: int) -> Iterator[list[Piece]]:
    """Group pieces in address order. A group's pages are in one file and have at most `limit` bytes."""
    window: list[Piece] = []
    for piece in sorted(pieces, key=lambda p: (p.file.ctypes.data, p.begin)):
        same = window and window[0].file.ctypes.data == piece.file.ctypes.data
        if not same or piece.end - window[0].begin > limit - 2 * mmap.PAGESIZE:
            if window:
                yield window
            window = []
        window.append(piece)
    if window:
        yield window
