"""Chooses a buffer's memory types by its purpose and the types' flags (VkMemoryPropertyFlagBits).

Types with flags other than the four below are not used. Lazily allocated memory is for images. Protected
memory and vendors' types (AMD's device coherent and uncached, NVIDIA's RDMA) need extra features.
"""

from __future__ import annotations

from collections.abc import Sequence

from vkbackend.buffer import Home

LOCAL, VISIBLE, COHERENT, CACHED = 1, 2, 4, 8
_PLAIN = LOCAL | VISIBLE | COHERENT | CACHED
MAPPED = (Home.STAGING, Home.HOST)  # the host reads and writes these buffers

Types = Sequence[tuple[int, int]]  # (flags, heap) by type


def is_plain(flags: int) -> bool:
    return not flags & ~_PLAIN


def suitable(types: Types, allowed: int, home: Home) -> list[int]:
    """Return the best memory type of each suitable heap, best first. `allowed` contains a bit per type.

    STAGING prefers cached types, because the host reads uncached memory at 0.2 GB/s. HOST prefers memory that
    is not device local. Other homes prefer device-local types that are not host visible, because host-visible
    device memory may be small.
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
    # Vulkan does not guarantee that every buffer may use a device-local type.
    fitting = [i for i in kinds if types[i][0] & needed] or ([] if home in MAPPED else kinds)
    best: dict[int, int] = {}
    # the sort is stable, so equal types remain in the driver's order
    for kind in sorted(fitting, key=score, reverse=True):
        best.setdefault(types[kind][1], kind)
    return list(best.values())
