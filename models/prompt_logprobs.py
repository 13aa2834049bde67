"""Log probabilities of a prompt's tokens, computed as rows of logits arrive."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vkbackend.models.sampling.logprobs import Logprobs, logprobs_of


class PromptLogprobs:
    """`logprobs` contains an entry, with `n_top` alternatives, for each token so far. The first entry is
    None."""

    def __init__(self, tokens: Sequence[int], n_top: int) -> None:
        self._tokens, self._n_top = tokens, n_top
        self.logprobs: list[Logprobs | None] = [None]

    @classmethod
    def of(cls, tokens: Sequence[int], n_top: int | None) -> PromptLogprobs | None:
        return None if n_top is None else cls(tokens, n_top)

    def push(self, logits: np.ndarray | None) -> None:
        """Add the logits [n, n_vocab] of the next n positions. Each row predicts the next token."""
        assert logits is not None
        for row in logits[: len(self._tokens) - len(self.logprobs)]:
            self.logprobs.append(logprobs_of(row, self._tokens[len(self.logprobs)], self._n_top))
