"""Learns how often drafted tokens are accepted.

Each source of drafts has a rate, because an n-gram of six tokens is right more often than an n-gram of three
tokens. A sequence's rates start at the rate of all sequences. Drafts are short until some of their tokens
were accepted, so drafts cost little if the text cannot be guessed.
"""

from __future__ import annotations

PRIOR = 0.5
# The rate of ngram-6 was measured on edited files (models/drafting/ngram.py). The rates of draft models and
# heads begin high, so that they are tried.
STRONG = {"ngram-6": 0.8, "draft": 0.8, "mtp": 0.8, "eagle3": 0.8}
WEIGHT = 2.0  # The prior counts as this many tokens.
GROWTH = 2.0  # Each accepted token makes drafts longer by this many tokens.
DECAY = 0.95  # Weight of earlier drafts, per draft: half of a rate comes from the last 14 drafts.


class Acceptance:
    """`common` holds the rates that a sequence begins with."""

    def __init__(self, common: Acceptance | None = None) -> None:
        self._common = common
        self._counts: dict[str, tuple[float, float]] = {}  # source -> (accepted, tried) tokens

    def rate(self, source: str) -> float:
        """Return the probability that a token is accepted if the tokens before it are."""
        accepted, tried = self._counts.get(source, (0.0, 0.0))
        prior = self._common.rate(source) if self._common else STRONG.get(source, PRIOR)
        return (accepted + WEIGHT * prior) / (tried + WEIGHT)

    def n_tried(self, source: str) -> float:
        """Return how many drafted tokens were verified. Old tokens count less."""
        return self._counts.get(source, (0.0, 0.0))[1]

    def limit(self, source: str) -> int:
        """Return how many tokens to draft at most: 1 at first, and 7 after 3 accepted tokens."""
        accepted, _ = self._counts.get(source, (0.0, 0.0))
        most = 1 + int(GROWTH * accepted)
        return max(most, self._common.limit(source)) if self._common else most

    def learn(self, source: str, n_drafted: int, n_accepted: int) -> None:
        """Count the verified tokens of a draft. Tokens after the first rejected token do not count."""
        accepted, tried = self._counts.get(source, (0.0, 0.0))
        n_tried = n_accepted + (n_accepted < n_drafted)
        self._counts[source] = DECAY * accepted + n_accepted, DECAY * tried + n_tried
        if self._common:
            self._common.learn(source, n_drafted, n_accepted)


def expected_tokens(rate: float, n_drafted: int) -> float:
    """Return the expected tokens of a step (Leviathan et al. 2023, arXiv:2211.17192, equation 1)."""
    return float(sum(rate**k for k in range(n_drafted + 1)))
