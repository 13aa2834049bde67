"""Chooses memory types for buffers by purpose, from flags (VkMemoryPropertyFlagBits) and heaps.

Types with other flags than the four below are not used, because lazily allocated memory is for images, and
protected and vendor types (AMD's device coherent and uncached, NVIDIA's RDMA) need extra features.
"""

from __future__ import annotations

from collections.abc import Sequence

from vkbackend.buffer import Home

LOCAL, VISIBLE, COHERENT, CACHED = 1, 2, 4, 8
_PLAIN = LOCAL | VISIBLE | COHERENT | CACHED
MAPPED = (Home.STAGING, Home.HOST)  # the host reads and writes these buffers in place

Types = Sequence[tuple[int, int]]  # (flags, heap) by type


def is_plain(flags: int) -> bool:
    return not flags & ~_PLAIN


def suitable(types: Types, allowed: int, home: Home) -> list[int]:
    """Return the best type of every suitable heap, best first. `allowed` is a bit mask of types.

    STAGING prefers cached to coherent types, because reads from write-combined memory run at 0.2 GB/s. HOST
    prefers memory outside the device. Other homes use device-local memory, preferably not host visible,
    because host-visible device memory may be small.
    """

    def score(kind: int) -> tuple[bool, ...]:
        flags = types[kind][0]
        local, coherent = bool(flags & LOCAL), bool(flags & COHERENT)
        if home is Home.HOST:
            return not local, coherent
        if home is Home.STAGING:
            return bool(flags & CACHED), coherent, not local
        return not flags & VISIBLE, coherent

    needed = VISIBLE if home in MAPPED else LOCAL
    kinds = [i for i, (flags, _) in enumerate(types) if allowed >> i & 1 and is_plain(flags)]
    # Vulkan does not promise that every buffer may use the device-local type.
    fitting = [i for i in kinds if types[i][0] & needed] or ([] if home in MAPPED else kinds)
    best: dict[int, int] = {}
    for kind in sorted(fitting, key=score, reverse=True):  # stable, so ties are in the driver's order
        best.setdefault(types[kind][1], kind)
    return list(best.values())
