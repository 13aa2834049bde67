from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from vkbackend.buffer import ALIGN, Home, View, Virtual, aligned, nbytes_of
from vkbackend.recording import Copy, Dispatch, Recording
from vkbackend.runtime import Device

# ---- weights and caches ----


@dataclass(frozen=True, slots=True)
class Packing:
    """The result of `pack`: the bytes of each chunk, and for each size the chunk and the byte offset in
    it."""

    chunks: tuple[int, ...]
    places: tuple[tuple[int, int], ...]


def pack(sizes: Sequence[int], chunk_limit: int) -> Packing:
    """Pack sizes in order into chunks of at most `chunk_limit` bytes."""
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
    packing = pack([nbytes_of(shape, dtype) for shape, dtype in views], chunk_limit)
    return Packing(tuple(max(n, ALIGN) for n in packing.chunks), packing.places)


def allocate(
    device: Device, views: Sequence[tuple[tuple[int, ...], str]], home: Home, label: str
) -> list[View]:
    """Allocate chunks, and return a View in them for each (shape, dtype) in `views`."""
    packing = packed(views, device.limits.max_allocation_nbytes)
    buffers = [device.buffer(n, home, f"{label}[{i}]") for i, n in enumerate(packing.chunks)]
    return [
        View(buffers[chunk], offset, shape, dtype)
        for (shape, dtype), (chunk, offset) in zip(views, packing.places, strict=True)
    ]


# ---- scratch ----


def lifetimes(recording: Recording) -> dict[Virtual, tuple[int, int]]:
    lives: dict[Virtual, tuple[int, int]] = {}
    for i, command in enumerate(recording.commands):
        if isinstance(command, Dispatch | Copy):
            for touched in (*command.reads, *command.writes):
                if isinstance(touched.buffer, Virtual):
                    lives[touched.buffer] = (lives.get(touched.buffer, (i, i))[0], i)
    return lives


def plan_scratch(recording: Recording, reuse: bool = True) -> tuple[dict[Virtual, int], int]:
    """Return the byte offset of each virtual value and the total bytes.

    A command's outputs never overlap its inputs. Without `reuse`, values do not share memory, so every value
    can be read after the step.
    """
    offsets: dict[Virtual, int] = {}
    alive: list[tuple[int, int, int]] = []  # (begin, end, last use) in order of address
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
