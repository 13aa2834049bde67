from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vkbackend.meta.step_kind import Wanted
from vkbackend.step import Run


class BatchImages(NamedTuple):
    """`rows` lists the rows of images in a micro-batch: (first row, float32 [n, n_embd * tables]).
    `positions` are the RoPE positions of all rows, int64 [n_rows, 3], or None if they equal the cells. Rows
    of images have token 0. If `sees_end`, the rows of some runs attend to later rows, up to the run's
    `end`."""

    rows: Sequence[tuple[int, np.ndarray]]
    positions: np.ndarray | None = None
    sees_end: bool = False


class MicroBatch(NamedTuple):
    """`runs` cover all rows in order. `outputs` are the rows whose logits are wanted. `masks` contains a bit
    for each token that an output row allows, uint32 [n_outputs, ceil(n_vocab / 32)], lowest bit first. None
    allows all tokens. `stage` is as in StepKind."""

    tokens: Sequence[int]
    runs: Sequence[Run]
    outputs: Sequence[int]
    masks: np.ndarray | None = None
    stage: int = -1
    images: BatchImages | None = None


# (candidate ids, logits, sums). The ids are None for complete rows of logits. The sums are log(sum(e^logit))
# of each row, or None if no log probabilities are wanted.
Rows = tuple[np.ndarray | None, np.ndarray, np.ndarray | None]


class StepHandle(NamedTuple):
    """The caller gets `k` candidates of each output row, or all logits if `k` is 0. `computed` is the step's
    result, which may contain more candidates. `n_recorded` counts the output rows of the recorded step.
    `place` selects the memory for the results."""

    n_outputs: int
    k: int
    computed: Wanted
    n_recorded: int
    place: int
