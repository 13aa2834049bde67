"""Predicts the next kinds of steps, so that an idle engine records them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vkbackend.meta.sizing import StepShape
from vkbackend.meta.step_kind import StepKind, Wanted, bucket, mix_of
from vkbackend.ops import MAX_VEC_ROWS
from vkbackend.step import Mix

MAX_USED = 8  # Neighbours of this many of the latest steps come first.


def likely_kinds(
    used: Sequence[StepKind], shape: StepShape, n_slots: int, max_top_k: int
) -> Iterator[StepKind]:
    """Yield kinds of steps, the most likely first. `used` has the kinds of computed steps, the latest first.

    A server that just started gets decoding steps of 1 to `n_slots` sequences, then prompts that fill a step
    or less, for one sequence, for all, and for some, then prompts together with decoding sequences. A running
    server first gets the steps with one bucket more or fewer rows, and one more or fewer outputs, than the
    latest steps.
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
    # One prompt, then a prompt for every slot, then prompts for some slots.
    for n_outputs in dict.fromkeys((1, outputs[-1], *outputs)):
        for n_rows in largest_first:
            if n_outputs < n_rows:
                halves = 0 < shape.halves <= n_rows
                mix = mix_of(n_rows // 2 if halves else n_rows)
                yield StepKind(n_rows, n_outputs, mix, wanted, halves=halves)
        if n_outputs == 1:
            # Few rows with a run of several: this run has one output, or none before its prompt ends.
            few = [n for n in rows if 1 < n <= MAX_VEC_ROWS]
            yield from (StepKind(n, k, Mix.FEW, wanted) for n in few for k in outputs if k <= bucket(n - 1))
    for n_outputs in outputs:
        for n_rows in reversed(largest_first):
            if n_outputs < n_rows:
                yield StepKind(n_rows, n_outputs, Mix.BOTH, wanted)


def buckets(n: int) -> list[int]:
    return sorted({bucket(i) for i in range(1, n + 1)})


def neighbours(sizes: Sequence[int], n: int) -> Sequence[int]:
    """Return n and its neighbours in `sizes`, the next larger first after n."""
    if n not in sizes:
        return (n,)
    at = sizes.index(n)
    return [n, *sizes[at + 1 : at + 2], *sizes[max(0, at - 1) : at]]
