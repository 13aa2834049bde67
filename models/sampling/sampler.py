"""From one row of logits to one token: repetition penalty, top-k, top-p, min-p, temperature, in that order.

The order and the meaning of each value are those of llama.cpp's sampler chain. Everything is numpy float64 on
the host; a request's random numbers come from its own generator, so neighbours in a batch cannot change its
output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vkbackend.errors import VkbackendError
from vkbackend.models.sampling.params import SamplingParams


class Sampler:
    """The sampling state of one request: its parameters and its random generator, PCG64(seed)."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.random = np.random.Generator(np.random.PCG64(params.seed))

    def sample(self, logits: np.ndarray, history: Sequence[int]) -> int:
        """The next token for float32 `logits` [n_vocab]; `history`: the tokens so far, oldest first.

        Raises VkbackendError if the logits hold NaN or +inf, or nothing but -inf.
        """
        params = self.params
        scores = self._penalized(logits, history)
        peak = scores.max()  # NaN if there is one anywhere
        check_finite(float(peak))
        if params.temperature == 0:
            return int(scores.argmax())
        if 0 < params.top_k < len(scores):
            ids = best(scores, params.top_k)
            return self._draw_best(ids, scores[ids])
        return self._draw(*self._kept(scores, peak), peak)

    def choose(self, ids: np.ndarray, logits: np.ndarray) -> int:
        """The next token, as `sample` would choose it, from the `n_candidates` best or more: ids [n] and
        their float32 logits, best first."""
        check_finite(float(logits[0]))
        if self.params.temperature == 0:
            return int(ids[0])
        n = self.params.top_k
        return self._draw_best(ids[:n], logits[:n].astype(np.float64))

    def _draw_best(self, ids: np.ndarray, scores: np.ndarray) -> int:
        """Draw from the candidates that top-k left, best first: top-p and min-p each keep the first few."""
        n, params = len(ids), self.params
        weights = np.exp(scores - scores[0])
        if params.top_p < 1:
            total = weights.cumsum()
            n = int(total.searchsorted(params.top_p * total[-1])) + 1
        if params.min_p > 0:
            n = min(n, int(np.count_nonzero(weights >= params.min_p)))
        return self._draw(ids[:n], scores[:n], scores[0])

    def _draw(self, ids: np.ndarray, scores: np.ndarray, peak: float) -> int:
        # Subtracting first keeps a tiny temperature from overflowing: the best candidate is exp(0).
        total = np.exp((scores - peak) / self.params.temperature).cumsum()
        draw = int(total.searchsorted(self.random.random() * total[-1], side="right"))
        return int(ids[min(draw, len(ids) - 1)])

    def _penalized(self, logits: np.ndarray, history: Sequence[int]) -> np.ndarray:
        scores = logits.astype(np.float64)
        n, last = len(history), self.params.repeat_last_n
        n = n if last == -1 else min(last, n)
        if n and self.params.repeat_penalty != 1:
            seen = np.unique(np.asarray(history[-n:], np.int64))
            values, penalty = scores[seen], self.params.repeat_penalty
            scores[seen] = np.where(values > 0, values / penalty, values * penalty)
        return scores

    def _kept(self, scores: np.ndarray, peak: float) -> tuple[np.ndarray, np.ndarray]:
        """Ids and scores of the tokens of a whole row that top-p and min-p keep."""
        params, weights = self.params, np.exp(scores - peak)
        reach = params.top_p * weights.sum()
        # min-p compares with the best alone and top-p sums from the best down, so either may come first. The
        # second term drops a tail that holds at most 1 - top_p together: sorting all of 152k scores would
        # take 15 ms.
        least = max(params.min_p, (weights.sum() - reach) / len(scores) if params.top_p < 1 else 0)
        ids = np.flatnonzero(weights >= least)
        if params.top_p < 1:
            ids = ids[np.argsort(-weights[ids], kind="stable")]
            n_kept = int(weights[ids].cumsum().searchsorted(reach)) + 1
            ids = ids[:n_kept]
        return ids, scores[ids]


def check_finite(peak: float) -> None:
    """Raises VkbackendError unless the largest logit of a row is a number."""
    if not math.isfinite(peak):
        raise VkbackendError(
            f"the largest logit is {peak}, so no token can be chosen: the weights are damaged or a device "
            "computed wrongly; try another file, or one device at a time"
        )


def best(scores: np.ndarray, n: int) -> np.ndarray:
    """Ids of the n (1..n_vocab) highest scores [n_vocab], best first, the lower id first on ties."""
    threshold = np.partition(scores, len(scores) - n)[len(scores) - n]
    ids = np.flatnonzero(scores >= threshold)
    return ids[np.argsort(-scores[ids], kind="stable")[:n]]
