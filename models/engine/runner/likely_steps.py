"""Predicts the next kinds of steps, so that an idle engine records them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from vkbackend.meta.sizing import StepShape
from vkbackend.meta.step_kind import StepKind, Wanted, bucket, mix_of
from vkbackend.ops import MAX_VEC_ROWS
from vkbackend.step import Mix

MAX_USED = 8  # Neighbours of this many of the latest steps come first.


def likely_kinds(
    used: Sequence[StepKind], shape: StepShape, n_slots: int, max_top_k: int
) -> Iterator[StepKind]:
    """Yield kinds of steps, the most likely first, some of them twice. `used` has the kinds of computed
    steps, the latest first.

    The neighbours of the latest steps come first: rows and outputs of the next larger or smaller bucket. Then
    come decoding steps, steps of prompts, and mixed steps of prompts and decoding sequences. The first mixed
    steps have the most outputs, and a power of two as number of rows, because a larger step can replace a
    step that is not recorded yet.
    """
    rows = buckets(shape.n_rows)
    outputs = buckets(min(n_slots, shape.n_outputs))
    wanted = next((kind.wanted for kind in used if not kind.masked), Wanted(max_top_k))
    if wanted.ahead or wanted.hidden:
        wanted = Wanted(max_top_k)
    for kind in used[:MAX_USED]:
        for n_rows in neighbours(rows, kind.n_rows):
            for n_outputs in neighbours(outputs, kind.n_outputs):
                if kind.mix is Mix.DECODE:
                    yield kind._replace(n_rows=n_outputs, n_outputs=n_outputs)
                elif kind.mix is Mix.BOTH and n_rows > MAX_VEC_ROWS and n_outputs < n_rows:
                    yield kind._replace(n_rows=n_rows, n_outputs=n_outputs)
    yield from (StepKind(n, n, Mix.DECODE, wanted) for n in outputs)
    largest_first = [n for n in reversed(rows) if n > MAX_VEC_ROWS]
    powers = [n for n in largest_first if n & n - 1 == 0]
    few = [n for n in rows if 1 < n <= MAX_VEC_ROWS]

    def prompts(sizes: Iterable[int], n_outputs: int) -> Iterator[StepKind]:
        for n in sizes:
            halves = 0 < shape.halves <= n
            if n_outputs < n:
                yield StepKind(n, n_outputs, mix_of(n // 2 if halves else n), wanted, halves=halves)

    def together(sizes: Iterable[int], n_outputs: int) -> Iterator[StepKind]:
        """Prompts with decoding sequences."""
        yield from (StepKind(n, n_outputs, Mix.BOTH, wanted) for n in sizes if n_outputs < n)

    yield from prompts(largest_first, 1)
    yield from prompts(largest_first, outputs[-1])
    for n in reversed(powers):
        yield from together([n], max(k for k in outputs if k < n))
    # Steps of few rows with a run of several rows. This run has one output, or none before its prompt ends.
    yield from (StepKind(n, max(k for k in outputs if k <= bucket(n - 1)), Mix.FEW, wanted) for n in few)
    for n_outputs in reversed(outputs):
        yield from prompts(largest_first, n_outputs)
        yield from (StepKind(n, n_outputs, Mix.FEW, wanted) for n in few if n_outputs <= bucket(n - 1))
        yield from together(reversed(largest_first), n_outputs)


def buckets(n: int) -> list[int]:
    return sorted({bucket(i) for i in range(1, n + 1)})


def neighbours(sizes: Sequence[int], n: int) -> Sequence[int]:
    """Return n and its neighbours in `sizes`, the next larger first after n."""
    if n not in sizes:
        return (n,)
    at = sizes.index(n)
    return [n, *sizes[at + 1 : at + 2], *sizes[max(0, at - 1) : at]]
