"""Drafters for tests. These drafters know the right tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from vkbackend.models.drafting.drafter import Draft, Want

Truth = Callable[[Want], Sequence[int]]


class Guesses:
    """Drafts of random length up to `n_max`. A token is right with probability `right`, and otherwise random.
    `truth` returns the next tokens of decoding without drafts."""

    stores = False
    source, seconds, spent_s = "guesses", 0.0, 0.0

    def __init__(self, truth: Truth, right: float, seed: int, n_vocab: int, n_max: int = 7) -> None:
        self._truth, self._right, self._rng = truth, right, random.Random(seed)
        self._n_vocab, self._n_max = n_vocab, n_max
        self.n_asked = self.n_drafted = self.n_accepted = self.closed = 0

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        self.n_asked += 1
        assert all(want.n > 0 for want in wants) and len({want.slot for want in wants}) == len(wants)
        drafts = [Draft([self._guess(token) for token in self._next(want)], "guesses") for want in wants]
        self.n_drafted += sum(len(draft.tokens) for draft in drafts)
        return drafts

    def _next(self, want: Want) -> Sequence[int]:
        n = min(want.n, self._n_max and self._rng.randint(0, self._n_max))
        return list(self._truth(want))[:n] if n else []

    def _guess(self, token: int) -> int:
        return token if self._rng.random() < self._right else self._rng.randrange(self._n_vocab)

    def source_of(self, want: Want) -> str:
        return self.source

    def owed(self, wants: Sequence[Want]) -> float:
        return 0.0

    def measure(self) -> bool:
        return False

    def took(self, slot: int, n_accepted: int) -> None:
        self.n_accepted += n_accepted

    def close(self) -> None:
        self.closed += 1


def always_right(truth: Truth, n: int) -> Guesses:
    """Return a drafter whose drafts are right and as long as wanted, at most `n` tokens."""
    guesses = Guesses(truth, 1.0, 0, 1, n)
    guesses._next = lambda want: list(truth(want))[: min(want.n, n)]  # type: ignore[method-assign]
    return guesses
