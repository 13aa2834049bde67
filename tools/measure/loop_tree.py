"""Counts the instructions that a subgroup issues in a complete kernel. Each loop counts as often as it runs.
The tree of loops comes from the listing, and the trips from the caller. Both must have the same loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vkbackend.errors import VkbackendError
from vkbackend.tools.measure.assembly import Listing, Op

# How often a loop runs each time that the code around it runs, and the same for its inner loops.
Trips = tuple[float, "Sequence[Trips]"]


class Issued(NamedTuple):
    """`instructions` excludes matrix multiplications and hints, which take no issue slot."""

    instructions: float = 0
    matrix: float = 0
    macs: float = 0
    loads: float = 0

    def __add__(self, other: object) -> Issued:
        assert isinstance(other, Issued)
        return Issued(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, n: float) -> Issued:
        return Issued(*(n * value for value in self))


@dataclass(frozen=True)
class Loop:
    """`own` counts the loop's instructions without its inner loops, once."""

    own: Issued
    inner: tuple[Loop, ...]

    def shape(self) -> str:
        return "(" + "".join(loop.shape() for loop in self.inner) + ")"


def loop_tree(listing: Listing) -> Loop:
    """Return the complete kernel as a loop that runs once. Back edges to one instruction form one loop."""
    by_start: dict[int, frozenset[int]] = {}
    for ops in listing.loops:
        by_start[min(ops)] = by_start.get(min(ops), frozenset()) | frozenset(ops)
    loops = sorted(by_start.values(), key=lambda ops: (-len(ops), min(ops)))
    power = max((op.power for op in listing.ops), default=0)

    def tree(ops: frozenset[int], inside: Sequence[frozenset[int]]) -> Loop:
        own, inner, left = ops, [], list(inside)
        while left:
            outer, *left = left
            if not outer <= ops:
                raise VkbackendError("two loops of the listing overlap, so their trips are unknown")
            inner.append((min(outer), tree(outer, [loop for loop in left if loop & outer])))
            left = [loop for loop in left if not loop & outer]
            own -= outer
        counts = Issued()
        for i in own:
            counts += _issued(listing.ops[i], power)
        return Loop(counts, tuple(loop for _, loop in sorted(inner, key=lambda pair: pair[0])))

    return tree(frozenset(range(len(listing.ops))), loops)


def _issued(op: Op, power: int) -> Issued:
    slots = 0.0 if op.kind in ("none", "matrix") else op.weight
    return Issued(slots, op.kind == "matrix", op.macs if op.power == power else 0, op.kind == "load")


def issued(loop: Loop, trips: Trips, kernel: str) -> Issued:
    """Raises VkbackendError if the trips of a loop are unknown."""
    times, inner = trips
    if len(inner) != len(loop.inner):
        raise VkbackendError(
            f"{kernel}: the compiler's listing has {len(loop.inner)} loops {loop.shape()} where trips of "
            f"{len(inner)} are known; correct the trips in tools/measure/attention_trips.py"
        )
    total = loop.own
    for one, of in zip(loop.inner, inner, strict=True):
        total += issued(one, of, kernel)
    return total.times(times)
