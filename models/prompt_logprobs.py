"""How likely the tokens of a prompt are, from the rows of logits as they come."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vkbackend.models.sampling.logprobs import Logprobs, logprobs_of


class PromptLogprobs:
    """`logprobs` of every token so far, None of the first; `n_top` alternatives of each."""

    def __init__(self, tokens: Sequence[int], n_top: int) -> None:
        self._tokens, self._n_top = tokens, n_top
        self.logprobs: list[Logprobs | None] = [None]

    @classmethod
    def of(cls, tokens: Sequence[int], n_top: int | None) -> PromptLogprobs | None:
        """None where nobody asks."""
        return None if n_top is None else cls(tokens, n_top)

    def push(self, logits: np.ndarray | None) -> None:
        """The logits after the next positions [n, n_vocab]."""
        assert logits is not None
        for row in logits[: len(self._tokens) - len(self.logprobs)]:
            self.logprobs.append(logprobs_of(row, self._tokens[len(self.logprobs)], self._n_top))
