"""Log probabilities of tokens, from the model's logits or from the candidates that the samplers keep."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vkbackend.models.sampling.candidates import Candidates, best


@dataclass(frozen=True, slots=True)
class Logprobs:
    """`top` lists the most likely tokens' log probabilities, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


def logprobs_of(logits: np.ndarray, token: int, n_top: int) -> Logprobs:
    """Return log probabilities, logit - log(sum(exp(logits))), for one row of logits [n_vocab]."""
    scores = logits.astype(np.float64)
    ids = best(scores, min(n_top, len(scores))) if n_top else np.empty(0, np.int64)
    peak = scores.max()
    scores -= peak + np.log(np.exp(scores - peak).sum())
    top = tuple(zip(ids.tolist(), scores[ids].tolist(), strict=True))
    return Logprobs(float(scores[token]), top)


def logprobs_of_best(ids: np.ndarray, logits: np.ndarray, log_sum: float, token: int, n_top: int) -> Logprobs:
    """Like `logprobs_of`, but from the row's best tokens, which must be sorted and include `token`. `log_sum`
    is log(sum(exp(logits))) of the complete row."""
    scores = logits.astype(np.float64) - log_sum
    top = tuple(zip(ids[:n_top].tolist(), scores[:n_top].tolist(), strict=True))
    return Logprobs(float(scores[ids == token][0]), top)


def logprobs_of_candidates(c: Candidates, token: int, n_top: int) -> Logprobs:
    """Return log probabilities relative to the candidates, which include `token`."""
    c.order()
    with np.errstate(divide="ignore"):
        scores = np.log(c.probabilities())
    top = tuple(zip(c.ids[:n_top].tolist(), scores[:n_top].tolist(), strict=True))
    return Logprobs(float(scores[c.ids == token][0]), top)
