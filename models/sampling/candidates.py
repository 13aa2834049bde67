"""The tokens that may still be chosen, with scores."""

from __future__ import annotations

import numpy as np


class Candidates:
    """`ids` is int64 [n], `scores` float64 [n]. If `ordered`, the best candidate is first; on ties, the lower
    id is first. If `whole`, the ids are 0..n-1. A score of -inf is never chosen."""

    __slots__ = ("ids", "ordered", "scores", "whole")

    def __init__(self, ids: np.ndarray, scores: np.ndarray, *, ordered: bool, whole: bool = False) -> None:
        self.ids, self.scores, self.ordered, self.whole = ids, scores, ordered, whole

    @classmethod
    def of_row(cls, scores: np.ndarray) -> Candidates:
        return cls(np.arange(len(scores)), scores, ordered=False, whole=True)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def peak(self) -> float:
        """Return the best score, or NaN if any score of a complete row is NaN."""
        return float(self.scores[0] if self.ordered else self.scores.max())

    def weights(self) -> np.ndarray:
        """Return exp(score - best score), the probabilities up to a factor."""
        return np.exp(self.scores - self.peak)

    def probabilities(self) -> np.ndarray:
        weights = self.weights()
        return weights / weights.sum()

    def keep(self, which: slice | np.ndarray) -> None:
        self.ids, self.scores, self.whole = self.ids[which], self.scores[which], False

    def order(self) -> None:
        if not self.ordered:
            by_score = -self.scores
            self.keep(by_score.argsort(kind="stable") if self.whole else np.lexsort((self.ids, by_score)))
            self.ordered = True

    def change(self, tokens: np.ndarray, scores: np.ndarray) -> None:
        self.scores[tokens] = scores
        self.ordered = False

    def find(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For the candidates that occur in `tokens`, return (their indices, their indices in `tokens`)."""
        if self.whole:
            return tokens, np.arange(len(tokens))
        by_id = self.ids.argsort()
        places = by_id[np.searchsorted(self.ids, tokens, sorter=by_id).clip(max=len(self) - 1)]
        which = np.flatnonzero(self.ids[places] == tokens)
        return places[which], which


def best(scores: np.ndarray, n: int) -> np.ndarray:
    """Return the ids of the n highest scores [n_vocab], best first, on ties the lower id first."""
    threshold = np.partition(scores, len(scores) - n)[len(scores) - n]
    ids = np.flatnonzero(scores >= threshold)
    return ids[np.argsort(-scores[ids], kind="stable")[:n]]
