"""Steps in flight: begun, but their output rows are not read yet. A pipeline over nodes has one step per
node, each with other sequences, so that all nodes compute. Otherwise one step is in flight at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from vkbackend.meta.step_kind import Wanted
from vkbackend.models.engine.sequence import Batch
from vkbackend.models.engine.step_times import Mark
from vkbackend.models.placement.layout import Layout
from vkbackend.step import Run

# A step's output rows: the ids of candidates (None: the logits are whole rows), the logits, and the logarithm
# of the sum of each whole row (None unless log probabilities of candidates are asked for).
Rows = tuple[np.ndarray | None, np.ndarray, np.ndarray | None]


class Launched(NamedTuple):
    """A step in flight. `k`: how many candidates of each output row the caller takes (0: whole rows);
    `computed`: what the step gives, which may be more; `place`: where its results arrive."""

    n_outputs: int
    k: int
    computed: Wanted
    place: int


@dataclass(slots=True)
class StepInFlight:
    """A step as the engine sees it. `handle` is the runner's."""

    batch: Batch
    handle: Any
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


def wanted_of(batch: Batch, most: int) -> Wanted:
    """As many candidates per output row as are enough for every sequence of a step. Whole rows, if `most`
    candidates are not enough."""
    k, summed = 0, False
    for sequence, _, n_outputs in batch:
        sampler = sequence.sampler
        if n_outputs:
            enough = sampler.n_candidates(sequence.tokens) if sampler else 0
            if not 0 < enough <= most:
                return Wanted()
            k = max(k, enough)
        summed |= sampler is not None and sampler.params.logprobs is not None
    return Wanted(k, summed and k > 0)


def n_stages(of: Sequence[int], split_mode: str, layout: Layout) -> int:
    """How many steps may be on their way: one for each host, where hosts work one after another. `of`: the
    host of each device. 1 if the output is on host 0: `launch` computes this host's part, so it would last
    until the step's end."""
    if split_mode not in ("layer", "hosts"):
        return 1
    vocab = layout.output_plan.ranges["vocab"]
    last = {of[d] for d, (begin, end) in enumerate(vocab) if begin < end}
    return 1 if 0 in last else len({of[d] for devices in layout.active.values() for d in devices} | last)
