"""Memory by purpose: chunked weights, scratch with liveness-planned reuse, pinned host pages.

Works on sizes and on the runtime seam; knows no Vulkan and no model.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vkbackend.buffer import Buffer, Home, View, Virtual
from vkbackend.errors import OutOfDeviceMemory
from vkbackend.recording import Copy, Dispatch, Recording
from vkbackend.runtime import Device

ALIGN = 256  # the largest storage and uniform offset alignment Vulkan allows a device to ask for


def aligned(nbytes: int, align: int = ALIGN) -> int:
    return -(-nbytes // align) * align


# ---- weights and kv: chunks sized before anything is allocated ----


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each of a list of sizes goes: `chunks` are chunk sizes, `places` (chunk, offset) per size, in
    bytes."""

    chunks: tuple[int, ...]
    places: tuple[tuple[int, int], ...]


def pack(sizes: Sequence[int], chunk_limit: int) -> Packing:
    """Put sizes one behind another into as few chunks of at most `chunk_limit` bytes as order allows."""
    chunks: list[int] = []
    places = []
    for nbytes in sizes:
        nbytes = aligned(nbytes)
        if not chunks or chunks[-1] + nbytes > chunk_limit:
            chunks.append(0)
        places.append((len(chunks) - 1, chunks[-1]))
        chunks[-1] += nbytes
    return Packing(tuple(chunks), tuple(places))


def packed(views: Sequence[tuple[tuple[int, ...], str]], chunk_limit: int) -> Packing:
    """Where views of the given (shape, dtype)s go; a chunk has at least ALIGN bytes."""
    dummy = Buffer(1 << 62, Home.SCRATCH, "packed")
    packing = pack([View(dummy, 0, shape, dtype).nbytes for shape, dtype in views], chunk_limit)
    return Packing(tuple(max(n, ALIGN) for n in packing.chunks), packing.places)


def allocate(
    device: Device, views: Sequence[tuple[tuple[int, ...], str]], home: Home, label: str
) -> list[View]:
    """Views of the given (shape, dtype)s in fresh chunks of `device`; empty shapes get a view of no bytes."""
    packing = packed(views, device.limits.max_allocation_nbytes)
    buffers = [device.buffer(n, home, f"{label}[{i}]") for i, n in enumerate(packing.chunks)]
    return [
        View(buffers[chunk], offset, shape, dtype)
        for (shape, dtype), (chunk, offset) in zip(views, packing.places, strict=True)
    ]


# ---- scratch: an address per value, shared by values that do not live at the same time ----


def lifetimes(recording: Recording) -> dict[Virtual, tuple[int, int]]:
    """First and last command index that touches each virtual value."""
    lives: dict[Virtual, tuple[int, int]] = {}
    for i, command in enumerate(recording.commands):
        if isinstance(command, Dispatch | Copy):
            for touched in (*command.reads, *command.writes):
                if isinstance(touched.buffer, Virtual):
                    lives[touched.buffer] = (lives.get(touched.buffer, (i, i))[0], i)
    return lives


def plan_scratch(recording: Recording, reuse: bool = True) -> tuple[dict[Virtual, int], int]:
    """(byte offset per virtual value, bytes in all): in order of first use, each at the lowest free address.

    Values whose lifetimes touch never overlap, so a command's outputs never share bytes with its inputs.
    Without `reuse` every value keeps bytes of its own and can be read after the step.
    """
    offsets: dict[Virtual, int] = {}
    alive: list[tuple[int, int, int]] = []  # begin, end, last use; sorted by address
    total = 0
    for value, (first, last) in sorted(lifetimes(recording).items(), key=lambda item: item[1]):
        if reuse:
            alive = [block for block in alive if block[2] >= first]
        offset, nbytes = 0, aligned(value.nbytes)
        for begin, end, _ in alive:
            if begin - offset >= nbytes:
                break
            offset = max(offset, end)
        insort(alive, (offset, offset + nbytes, last))
        offsets[value] = offset
        total = max(total, offset + nbytes)
    return offsets, total


# ---- host pages ----


class HostPages:
    """Page-aligned private anonymous memory that devices can import.

    Private, because a shared mapping counts as file backed and amdgpu refuses to import it; kept out of
    forked children, whose copy-on-write would move the parent's pages away from under the device.
    """

    home = Home.PAGES

    def __init__(self, nbytes: int, align: int = 4096) -> None:
        self.nbytes = aligned(max(nbytes, 1), align)
        try:
            self._map = mmap.mmap(-1, self.nbytes + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise OutOfDeviceMemory(
                f"the host has no {self.nbytes} bytes of memory for pages that devices share ({error}); "
                "use a smaller model or context",
                requested=self.nbytes,
            ) from None
        self._map.madvise(mmap.MADV_DONTFORK)
        whole = np.frombuffer(self._map, np.uint8)
        skip = -whole.ctypes.data % align
        self.bytes = whole[skip : skip + self.nbytes]

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)


class FilePages:
    """The pages around bytes begin..end of a mapped file, as HostPages are: `lead` bytes of them come before.

    Read only, and the file's for good: who cuts the file short takes them away (SIGBUS). Keeps it mapped.
    """

    home = Home.MAPPED

    def __init__(self, file: np.ndarray, begin: int, end: int) -> None:
        self._file, page = file, mmap.PAGESIZE
        first = int(file.ctypes.data) + begin
        self.lead = first % page
        self.address = first - self.lead
        self.nbytes = aligned(self.lead + end - begin, page)
        # Of the last page more than the file has may be read: zeros.
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.address))
        self.bytes.flags.writeable = False


Pages = HostPages | FilePages
