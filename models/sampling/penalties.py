"""Samplers that lower the scores of repeated tokens. Definitions are as in llama.cpp
(src/llama-sampler.cpp)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from vkbackend.models.sampling.candidates import Candidates

MAX_TAIL = 20
_MAX_LOG = 88.7228391  # log of the largest float32

Breakers = Mapping[int, Sequence[tuple[int, ...]]]


def recent(history: Sequence[int], n: int) -> Sequence[int]:
    return history if n == -1 else history[len(history) - min(n, len(history)) :]


def penalize(c: Candidates, window: Sequence[int], repeat: float, frequency: float, presence: float) -> None:
    """For tokens in the window, divide positive logits and multiply negative logits by `repeat` (Keskar et
    al. 2019, arXiv:1909.05858). Then subtract n * frequency + presence for a token that occurs n times
    (OpenAI's API reference)."""
    if not window:
        return
    tokens, counts = np.unique(np.asarray(window, np.int64), return_counts=True)
    places, which = c.find(tokens)
    scores, counts = c.scores[places], counts[which]
    scores = np.where(scores > 0, scores / repeat, scores * repeat)
    c.change(places, scores - counts * frequency - presence)


def dry_penalties(
    window: Sequence[int], multiplier: float, base: float, allowed: int, breakers: Breakers
) -> dict[int, float]:
    """Return a penalty, multiplier * base ** (n - allowed), for each token that would extend a repetition of
    the last n >= allowed tokens ("don't repeat yourself", p-e-w,
    github.com/oobabooga/text-generation-webui/pull/5677). Repetitions end at breakers."""
    n_window = len(window)
    if n_window <= allowed:
        return {}
    longest = allowed + (int(_MAX_LOG / math.log(base)) if base > 1.000001 else 0)
    longest = min(longest, n_window, _since_breaker(window, breakers, longest))
    if longest < allowed:
        return {}
    tokens = np.asarray(window, np.int64)
    lengths = _repeats(tokens, longest)
    ends = np.flatnonzero(lengths >= allowed)
    longest_by_token: dict[int, int] = {}
    for token, length in zip(tokens[ends + 1].tolist(), lengths[ends].tolist(), strict=True):
        longest_by_token[token] = max(length, longest_by_token.get(token, 0))
    return {
        token: multiplier * base ** (length - allowed)
        for token, length in longest_by_token.items()
        if () not in breakers.get(token, ())
    }


def _since_breaker(window: Sequence[int], breakers: Breakers, enough: int) -> int:
    """Return how many tokens follow the last breaker. The search ends after `enough` tokens."""
    n = len(window)
    for i in range(min(n, enough + MAX_TAIL + 1) if breakers else 0):
        matching = [
            len(tail)
            for tail in breakers.get(window[n - 1 - i], ())
            if len(tail) <= i and tuple(window[n - i : n - i + len(tail)]) == tail
        ]
        if matching:
            return i - max(matching)
    return n


def _repeats(tokens: np.ndarray, longest: int) -> np.ndarray:
    """For each position except the last, return how many tokens up to that position equal the last tokens, at
    most `longest`."""
    n = len(tokens)
    lengths = np.zeros(n - 1, np.int64)
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    for length in range(1, longest + 1):
        lengths[ends] = length
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[n - 1 - length]]
        if not len(ends):
            break
    return lengths


def subtract(c: Candidates, penalties: Mapping[int, float]) -> None:
    if penalties:
        places, which = c.find(np.fromiter(penalties, np.int64, len(penalties)))
        loss = np.fromiter(penalties.values(), np.float64, len(penalties))[which]
        c.change(places, c.scores[places] - loss)
