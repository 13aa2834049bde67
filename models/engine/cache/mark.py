"""The adapters that computed a sequence's cells. Equal tokens with different adapters have different
cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vkbackend.models.adapters.info import AdapterInfo

EVERYWHERE = 1 << 62  # more than any position


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """An adapter of the rows from position `start` on. The cells depend on its content (`digest`), not on its
    id, name or file."""

    id: int
    scale: float
    digest: str
    start: int = 0


Mark = tuple[AdapterUse, ...]  # in the order of digests, so that sums have the same bits
BlockMark = tuple[tuple[str, float, int], ...]


def mark_of(
    tokens: Sequence[int], adapters: Sequence[tuple[int, float]], known: Sequence[AdapterInfo]
) -> Mark:
    """Return the mark of a prompt with adapters (id, scale). An adapter with invocation tokens applies from
    their last occurrence in the prompt on. Without an occurrence, the adapter does not apply."""
    uses = []
    for number, scale in adapters:
        info = known[number]
        start = last_occurrence(tokens, info.invocation) if info.invocation else 0
        if scale and start is not None:
            uses.append(AdapterUse(number, scale, info.digest, start))
    return tuple(sorted(uses, key=lambda use: (use.digest, use.id)))


def last_occurrence(tokens: Sequence[int], wanted: Sequence[int]) -> int | None:
    first, n = wanted[0], len(wanted)
    for at in range(len(tokens) - n, -1, -1):
        if tokens[at] == first and tuple(tokens[at : at + n]) == tuple(wanted):
            return at
    return None


def block_mark(mark: Mark, begin: int, end: int) -> BlockMark:
    """Return the adapters of a block's positions: (digest, scale, first position in the block)."""
    return tuple((use.digest, use.scale, max(0, use.start - begin)) for use in mark if use.start < end)


def adapters_at(mark: Mark, position: int) -> tuple[tuple[int, float], ...]:
    """Return (id, scale) of a row's adapters."""
    return tuple((use.id, use.scale) for use in mark if use.start <= position)


def next_start(mark: Mark, position: int) -> int:
    """Return the first position after `position` whose adapters differ, or EVERYWHERE."""
    return min((use.start for use in mark if use.start > position), default=EVERYWHERE)


def n_alike(a: Mark, b: Mark) -> int:
    """Return how many leading positions have the same adapters."""
    if a == b:
        return EVERYWHERE
    known = [{(use.digest, use.scale, use.start) for use in mark} for mark in (a, b)]
    return min((start for _, _, start in known[0] ^ known[1]), default=EVERYWHERE)


def shifted(mark: Mark, n_kept: int) -> Mark:
    """Return the mark after a context shift that keeps `n_kept` tokens. The adapters of later rows do not
    change."""
    return tuple(replace(use, start=min(use.start, n_kept)) for use in mark)
