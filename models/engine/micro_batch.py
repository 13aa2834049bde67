from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vkbackend.meta.step_kind import Wanted
from vkbackend.step import Run


class MicroBatch(NamedTuple):
    """`runs` tile the rows in order. `outputs`: the rows whose logits are wanted. `masks`: the tokens that
    may be candidates of each output row, uint32 [n_outputs, ceil(n_vocab / 32)], the lowest bit of a word
    first; None: all tokens."""

    tokens: Sequence[int]
    runs: Sequence[Run]
    outputs: Sequence[int]
    masks: np.ndarray | None = None


# For the output rows of a step: ids of candidates (None: all logits of a row are given), logits, and
# log(sum(e^logit)) of each row (None unless log probabilities of candidates are wanted).
Rows = tuple[np.ndarray | None, np.ndarray, np.ndarray | None]


class StepHandle(NamedTuple):
    """`k`: how many candidates of each output row the caller takes (0: all logits). `computed`: what the
    step computes, which may be more. `place`: where the results are written."""

    n_outputs: int
    k: int
    computed: Wanted
    place: int
