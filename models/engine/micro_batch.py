"""The rows of a step, its handle in flight, and its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vkbackend.meta.step_kind import Wanted
from vkbackend.step import Run


class MicroBatch(NamedTuple):
    """`runs` tile the rows in order. `outputs`: the rows whose logits are wanted. `masks`: the tokens that
    may be candidates of each output row, uint32 [n_outputs, ceil(n_vocab / 32)], the lowest bit of a word
    first. None: all."""

    tokens: Sequence[int]
    runs: Sequence[Run]
    outputs: Sequence[int]
    masks: np.ndarray | None = None


# Of a step's output rows: ids of candidates (None: the logits are whole rows), logits, and log(sum(e^logit))
# of each whole row (None unless log probabilities of candidates are wanted).
Rows = tuple[np.ndarray | None, np.ndarray, np.ndarray | None]


class StepHandle(NamedTuple):
    """`k`: how many candidates of each output row the caller takes (0: whole rows). `computed`: what the step
    gives, perhaps more. `place`: where its results arrive."""

    n_outputs: int
    k: int
    computed: Wanted
    place: int
