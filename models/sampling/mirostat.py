"""Mirostat chooses tokens so that the text's surprise, -log2 of each token's probability, stays near a target
(Basu et al. 2020, arXiv:2007.14966). Formulas and constants are as in llama.cpp."""

from __future__ import annotations

import math

import numpy as np

from vkbackend.models.sampling.candidates import Candidates, best
from vkbackend.models.sampling.filters import top_k

N_ESTIMATED = 100  # Version 1 fits s to this many tokens.


class Mirostat:
    """Keeps tokens up to a surprise of `mu`. Each chosen token changes `mu` by `eta` times the difference
    between the target `tau` and the token's surprise."""

    def __init__(self, version: int, tau: float, eta: float) -> None:
        self.version, self.tau, self.eta, self.mu = version, tau, eta, 2 * tau

    def draw(self, c: Candidates, random: np.random.Generator) -> int:
        self.cut(c)
        q = c.probabilities()
        place = min(int(q.cumsum().searchsorted(random.random(), side="right")), len(c) - 1)
        self.learn(float(q[place]))
        return int(c.ids[place])

    def cut(self, c: Candidates) -> None:
        top_k(c, max(1, self._n_by_exponent(c) if self.version == 1 else self._n_by_surprise(c)))

    def learn(self, probability: float) -> None:
        self.mu -= self.eta * (-math.log2(probability) - self.tau)

    def _n_by_surprise(self, c: Candidates) -> int:
        """For version 2, return how many tokens have a surprise of at most `mu`."""
        with np.errstate(divide="ignore"):
            return int(np.count_nonzero(-np.log2(c.probabilities()) <= self.mu))

    def _n_by_exponent(self, c: Candidates) -> int:
        """For version 1, return the rank whose surprise is `mu` if probabilities fall as rank ** -s. The
        exponent s is fitted to the most likely tokens."""
        q = c.probabilities()
        q = q[best(q, min(N_ESTIMATED, len(q)))]
        q = q[q > 0]
        if len(q) < 2:
            return 1
        ranks = np.arange(1, len(q))
        t, b = np.log((ranks + 1) / ranks), np.log(q[:-1] / q[1:])
        s = float(t @ b) / float(t @ t)
        epsilon = s - 1
        try:
            return int(((epsilon * 2**self.mu) / (1 - len(c) ** -epsilon)) ** (1 / s))
        except (ZeroDivisionError, OverflowError):  # probabilities are equal, or s = 1
            return len(c)
