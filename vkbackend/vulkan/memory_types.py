"""Which memory types of a device suit a buffer, by what it is for. Knows flags and heaps, calls no driver.

Flags are VkMemoryPropertyFlagBits. A type with any other flag than the four here is left alone: lazily
allocated memory is for images, protected and vendors' memory (AMD's device coherent and uncached, NVIDIA's
RDMA) needs features of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from vkbackend.buffer import Home

LOCAL, VISIBLE, COHERENT, CACHED = 1, 2, 4, 8
_PLAIN = LOCAL | VISIBLE | COHERENT | CACHED
MAPPED = (Home.STAGING, Home.HOST)  # the host reads and writes them in place

Types = Sequence[tuple[int, int]]  # (flags, heap) by type


def is_plain(flags: int) -> bool:
    return not flags & ~_PLAIN


def suitable(types: Types, allowed: int, home: Home) -> list[int]:
    """The best type of every heap that has a suitable one, the best first; `allowed` is a bit mask of types.

    Staging: cached before coherent, because reads from write-combined memory run at 0.2 GB/s. Host: not the
    device's own memory, if there is other. All else: device local, not host visible where there is a choice
    (that window may be small).
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
    found = [i for i, (flags, _) in enumerate(types) if allowed >> i & 1 and is_plain(flags)]
    # Every device has a device-local type, but Vulkan does not promise that every buffer may use it.
    fitting = [i for i in found if types[i][0] & needed] or ([] if home in MAPPED else found)
    best: dict[int, int] = {}
    for kind in sorted(fitting, key=score, reverse=True):  # stable: equal types stay in the driver's order
        best.setdefault(types[kind][1], kind)
    return list(best.values())
