from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from vkbackend.buffer import ALIGN, Home, View, Virtual, aligned, nbytes_of
from vkbackend.recording import Copy, Dispatch, Recording
from vkbackend.repeats import name_in_layer
from vkbackend.runtime import Device

# ---- weights and caches ----


@dataclass(frozen=True, slots=True)
class Packing:
    """The result of `pack`: `chunks` lists the bytes of each chunk, and `places` the (chunk, byte offset in
    the chunk) of each size."""

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
    can be read after the step. With `reuse`, a value has the same offset in every equal layer. The largest
    values are placed first, each at the lowest offset that is free while the value lives (greedy by size;
    Pisarchyk and Lee 2020, arXiv:2001.03288).
    """
    lives = sorted(lifetimes(recording).items(), key=lambda item: item[1])
    if not reuse:
        begins = accumulate((aligned(value.nbytes) for value, _ in lives), initial=0)
        *apart, end = begins
        return {value: begin for (value, _), begin in zip(lives, apart, strict=True)}, end
    shared, beside = _shared_offsets(lives)
    offsets: dict[object, int] = {}
    total = 0
    for place in sorted(beside, key=lambda place: -place.nbytes):
        offset = 0
        for begin, end in sorted((offsets[p], offsets[p] + p.nbytes) for p in beside[place] if p in offsets):
            if begin - offset >= place.nbytes:
                break
            offset = max(offset, end)
        offsets[place] = offset
        total = max(total, offset + place.nbytes)
    return {value: offsets[place] for value, place in shared.items()}, total


class _Place(NamedTuple):
    """A range of scratch memory. Equal values of several layers share it. `name` is the value's name in its
    layer, `number` counts values with the same label, and `lane` distinguishes values that live at the same
    time."""

    name: str
    number: int
    nbytes: int
    lane: int


def _shared_offsets(
    lives: Sequence[tuple[Virtual, tuple[int, int]]],
) -> tuple[dict[Virtual, _Place], dict[_Place, set[_Place]]]:
    """Return the place of each value, and for each place the set of places that are in use at the same
    time."""
    shared: dict[Virtual, _Place] = {}
    beside: dict[_Place, set[_Place]] = {}
    alive: dict[_Place, int] = {}  # the last use
    numbers: Counter[str] = Counter()  # by label
    for value, (first, last) in lives:
        alive = {place: end for place, end in alive.items() if end >= first}
        place = _Place(name_in_layer(value.label), numbers[value.label], aligned(value.nbytes), 0)
        numbers[value.label] += 1
        while place in alive:
            place = place._replace(lane=place.lane + 1)
        for other in alive:
            beside[other].add(place)
        beside.setdefault(place, set()).update(alive)
        alive[place] = last
        shared[value] = place
    return shared, beside
