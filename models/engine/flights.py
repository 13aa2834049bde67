"""Steps on their way: begun, their output rows not read yet. A pipeline over hosts has as many as hosts, each
of other sequences, so that every host computes one; else there is one at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vkbackend.models.engine.scheduler import Batch
from vkbackend.step import Run

# Of a step's output rows: candidates' ids, or None where the logits are whole rows; logits; the logarithms of
# their sums, where logprobs of candidates are asked for.
Rows = tuple[np.ndarray | None, np.ndarray, np.ndarray | None]


class Launched(NamedTuple):
    """A step on its way: output rows, candidates wanted of each and computed (0: whole rows), whether with
    sums, and the place where they come to lie."""

    n_outputs: int
    k: int
    computed: int
    summed: bool
    place: int


class Mark(NamedTuple):
    """A moment: time.perf_counter(), how many steps were recorded until then, and the seconds of that."""

    at: float
    n_recorded: int
    record_s: float

    def until(self, later: Mark) -> float:
        """Seconds, less what recording and compiling took, which is done once."""
        return later.at - self.at - (later.record_s - self.record_s)


@dataclass(slots=True)
class Flight:
    """The engine's step: its batch, what the runner calls it, when it began, its rows."""

    batch: Batch
    step: Any
    began: Mark
    n_rows: int
    n_decode: int


def rows_of(batch: Batch) -> tuple[list[int], list[Run], list[int], int]:
    """A batch as a runner takes it: tokens, runs, output rows; and how many of its rows decode."""
    tokens: list[int] = []
    runs: list[Run] = []
    outputs: list[int] = []
    n_decode = 0
    for sequence, n, n_outputs in batch:
        first, start = len(tokens), sequence.n_stored
        runs.append(Run(sequence.slot, first, n, start))
        if n == 1:
            n_decode += sequence.n_wanted == 1  # else one row of a prompt
            tokens.append(sequence.tokens[start])
        else:
            tokens += sequence.tokens[start : start + n]
        if n_outputs:
            outputs += range(first + n - n_outputs, first + n)
    return tokens, runs, outputs, n_decode


def candidates_of(batch: Batch, most: int) -> tuple[int, bool]:
    """Candidates per output row that are enough for every sequence of a step, whole rows are where it is 0;
    and whether with the logarithms of sums."""
    k, summed = 0, False
    for sequence, _, n_outputs in batch:
        sampler = sequence.sampler
        if n_outputs:
            wanted = sampler.n_candidates(sequence.tokens) if sampler else 0
            if not 0 < wanted <= most:
                return 0, False
            k = max(k, wanted)
        summed |= sampler is not None and sampler.params.logprobs is not None
    return k, summed and k > 0
