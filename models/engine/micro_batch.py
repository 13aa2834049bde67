"""The rows that a step computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

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
