"""From one row of logits to one token: repetition penalty, top-k, top-p, min-p, temperature, in that order.

The order and the meaning of each value are those of llama.cpp's sampler chain. Everything is numpy float64 on
the host; a request's random numbers come from its own generator, so neighbours in a batch cannot change its
output.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from vkbackend.checks import finite, whole, whole_number
from vkbackend.errors import VkbackendError
from vkbackend.options import check_fields, option

MAX_SEED = (1 << 64) - 1


class SamplingKeywords(TypedDict, total=False):
    """What may be given for the fields of `SamplingParams`: how the next token is chosen."""

    temperature: float
    """How much chance decides (default: 0.8); 0 takes the most likely token, the lowest id on ties."""
    top_k: int
    """Candidates that are kept, the most likely ones (default: 40); 0 keeps all."""
    top_p: float
    """Keep the smallest set of tokens whose probabilities reach this sum (default: 0.95); 1 keeps all."""
    min_p: float
    """Keep tokens from this fraction of the best probability upwards (default: 0.05); 0 keeps all."""
    repeat_penalty: float
    """Divides positive and multiplies negative logits of recent tokens (default: 1.0, which changes
    nothing)."""
    repeat_last_n: int
    """How many recent tokens are penalized, the prompt included (default: 64); 0: none, -1: all."""
    seed: int | None
    """Seed of the random numbers. None (default) or -1 draws one, which `Completion.seed` tells."""


def _seed(name: str, value: Any) -> int:
    seed = -1 if value is None else whole_number(name, value, -1, MAX_SEED, " (-1 or None: a random one)")
    return secrets.randbits(32) if seed == -1 else seed


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; the defaults are those of llama.cpp's command line. `SamplingKeywords`
    describes the fields. Raises InvalidArgument.
    """

    temperature: float = option(0.8, finite(0, math.inf, " (0: greedy)"))
    top_k: int = option(40, whole(0, 1 << 31, " (0: all tokens)"))
    top_p: float = option(0.95, finite(0, 1, " (1: all tokens)"))
    min_p: float = option(0.05, finite(0, 1, " (0: all tokens)"))
    repeat_penalty: float = option(1.0, finite(1e-6, math.inf, " (1: none)"))
    repeat_last_n: int = option(64, whole(-1, 1 << 31, " (0: no penalty, -1: all tokens)"))
    seed: int | None = option(None, _seed)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def n_candidates(self) -> int:
        """How many of the likeliest tokens decide the choice; 0 where all of them may."""
        if self.repeat_penalty != 1 and self.repeat_last_n:
            return 0
        return 1 if self.temperature == 0 else self.top_k


class Sampler:
    """The sampling state of one request: its parameters and its random generator, PCG64(seed)."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._random = np.random.Generator(np.random.PCG64(params.seed))

    def sample(self, logits: np.ndarray, history: Sequence[int]) -> int:
        """The next token for float32 `logits` [n_vocab]; `history`: the tokens so far, oldest first.

        Raises VkbackendError if the logits hold NaN or +inf, or nothing but -inf.
        """
        params = self.params
        scores = self._penalized(logits, history)
        peak = scores.max()  # NaN if there is one anywhere
        _check_finite(peak)
        if params.temperature == 0:
            return int(scores.argmax())
        return self._draw(*self._candidates(scores, peak), peak)

    def choose(self, ids: np.ndarray, logits: np.ndarray, n_vocab: int) -> int:
        """The next token, as `sample` would choose it, from the `n_candidates` best or more: ids [n] and
        their float32 logits, best first."""
        _check_finite(logits[0])
        if self.params.temperature == 0:
            return int(ids[0])
        n, scores = self.params.top_k, logits.astype(np.float64)
        return self._draw(*self._kept(ids[:n], scores[:n], scores[0], n_vocab), scores[0])

    def _draw(self, ids: np.ndarray, scores: np.ndarray, peak: float) -> int:
        params = self.params
        # Subtracting first keeps a tiny temperature from overflowing: the best candidate is exp(0).
        total = np.exp((scores - peak) / params.temperature).cumsum()
        draw = int(np.searchsorted(total, self._random.random() * total[-1], side="right"))
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

    def _candidates(self, scores: np.ndarray, peak: float) -> tuple[np.ndarray, np.ndarray]:
        """Ids and scores of the tokens that top-k, top-p and min-p keep."""
        n_vocab, top_k = len(scores), self.params.top_k
        ids = best(scores, top_k) if 0 < top_k < n_vocab else np.arange(n_vocab)
        return self._kept(ids, scores[ids], peak, n_vocab)

    def _kept(
        self, ids: np.ndarray, scores: np.ndarray, peak: float, n_vocab: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids and scores of the tokens that top-p and min-p keep."""
        params, weights = self.params, np.exp(scores - peak)
        reach = params.top_p * weights.sum()
        # min-p compares with the best alone and top-p sums from the best down, so either may come first. The
        # second term drops a tail that holds at most 1 - top_p together: sorting all of 152k scores would
        # take 15 ms.
        least = max(params.min_p, (weights.sum() - reach) / n_vocab if params.top_p < 1 else 0)
        kept = weights >= least
        ids, scores, weights = ids[kept], scores[kept], weights[kept]
        if params.top_p < 1:
            order = np.argsort(-weights, kind="stable")
            n_kept = int(np.searchsorted(weights[order].cumsum(), reach)) + 1
            ids, scores = ids[order[:n_kept]], scores[order[:n_kept]]
        return ids, scores


def _check_finite(peak: float) -> None:
    if not np.isfinite(peak):
        raise VkbackendError(
            f"the largest logit is {peak}, so no token can be chosen: the weights are damaged or a device "
            "computed wrongly; try another file, or one device at a time"
        )


def best(scores: np.ndarray, n: int) -> np.ndarray:
    """Ids of the n (1..n_vocab) highest scores [n_vocab], best first, the lower id first on ties."""
    threshold = np.partition(scores, len(scores) - n)[len(scores) - n]
    ids = np.flatnonzero(scores >= threshold)
    return ids[np.argsort(-scores[ids], kind="stable")[:n]]
