"""The rows that a step computes, the handle of a step in flight, and its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vkbackend.meta.step_kind import Wanted
from vkbackend.step import Run


class MicroBatch(NamedTuple):
    """The tokens of all rows, the runs that tile the rows in order, the rows whose logits are wanted.

    `masks`: of each output row, the tokens that may be candidates, uint32 [n_outputs, ceil(n_vocab / 32)],
    the lowest bit of a word first. None: all tokens may be.
    """

    tokens: Sequence[int]
    runs: Sequence[Run]
    outputs: Sequence[int]
    masks: np.ndarray | None = None


# A step's output rows: the ids of candidates (None: the logits are whole rows), the logits, and the logarithm
# of the sum of each whole row (None unless log probabilities of candidates are wanted).
Rows = tuple[np.ndarray | None, np.ndarray, np.ndarray | None]


class StepHandle(NamedTuple):
    """A step in flight, as its runner sees it. `k`: how many candidates of each output row the caller takes
    (0: whole rows); `computed`: what the step gives, which may be more; `place`: where its results arrive."""

    n_outputs: int
    k: int
    computed: Wanted
    place: int
