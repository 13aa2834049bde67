"""Chooses a buffer's memory types by its purpose and the types' flags (VkMemoryPropertyFlagBits).

Only types without other flags than the four below are used. Other flags mark memory for images (lazily
allocated), or memory that needs extra features (protected, AMD's device coherent and uncached, NVIDIA's
RDMA).
"""

from __future__ import annotations

from collections.abc import Sequence

from vkbackend.buffer import CACHED_KIND, COMBINED_KIND, Home

LOCAL, VISIBLE, COHERENT, CACHED = 1, 2, 4, 8
_PLAIN = LOCAL | VISIBLE | COHERENT | CACHED
MAPPED = (Home.STAGING, Home.HOST, Home.STREAM, Home.VISIBLE)  # buffers that the host reads and writes

Types = Sequence[tuple[int, int]]  # (flags, heap) by type


def is_plain(flags: int) -> bool:
    return not flags & ~_PLAIN


def host_kinds(types: Types) -> tuple[str, ...]:
    """Return which of CACHED_KIND and COMBINED_KIND a device has for HOST, the default first."""
    every = (1 << len(types)) - 1
    default = suitable(types, every, Home.HOST)[:1]
    both = [i for kind in (CACHED_KIND, COMBINED_KIND) for i in suitable(types, every, Home.HOST, kind)[:1]]
    kinds = (CACHED_KIND if types[i][0] & CACHED else COMBINED_KIND for i in (*default, *both))
    return tuple(dict.fromkeys(kinds))


def suitable(types: Types, allowed: int, home: Home, host_kind: str = "") -> list[int]:
    """Return the best memory type of each suitable heap, best first. `allowed` has a bit per type.

    STAGING prefers cached types, because the host reads uncached memory at 0.2 GB/s. HOST and STREAM prefer
    memory that is not device local, and then types of `host_kind`, if given. VISIBLE needs device-local types
    that are host visible. Other homes prefer device-local types that are not host visible.

    Without a resizable BAR, the host sees 256 MiB of device memory, which form a separate heap. Drivers need
    this heap, so it is not used.
    """

    def score(kind: int) -> tuple[bool, ...]:
        flags = types[kind][0]
        local, coherent = bool(flags & LOCAL), bool(flags & COHERENT)
        if home in (Home.HOST, Home.STREAM):
            return not local, not host_kind or bool(flags & CACHED) == (host_kind == CACHED_KIND), coherent
        if home is Home.STAGING:
            return bool(flags & CACHED), coherent, not local
        return not flags & VISIBLE, coherent

    needed = VISIBLE if home in MAPPED else LOCAL
    if home is Home.VISIBLE:
        needed |= LOCAL
    small = _small_bars(types)
    kinds = [
        i
        for i, (flags, heap) in enumerate(types)
        if allowed >> i & 1 and is_plain(flags) and heap not in small
    ]
    # Vulkan does not guarantee that every buffer may use a device-local type.
    fitting = [i for i in kinds if types[i][0] & needed == needed] or ([] if home in MAPPED else kinds)
    best: dict[int, int] = {}
    # the sort is stable, so equal types remain in the driver's order
    for kind in sorted(fitting, key=score, reverse=True):
        best.setdefault(types[kind][1], kind)
    return list(best.values())


def _small_bars(types: Types) -> set[int]:
    """If the host does not see all device memory, return the heaps that contain only host-visible device
    memory."""
    plain = [(flags, heap) for flags, heap in types if is_plain(flags)]
    hidden = {heap for flags, heap in plain if flags & LOCAL and not flags & VISIBLE}
    visible = {heap for flags, heap in plain if flags & LOCAL and flags & VISIBLE}
    return visible - hidden if hidden else set()
