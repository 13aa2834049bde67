"""Bounds the time that drafts may lose, for any guesses and any cost of steps.

A draft takes the time of its own computation and of the additional rows of a step, and saves the time of the
accepted tokens. After drafts have lost the time of LOSS steps since the best moment so far, only tries are
verified, and each try comes after twice as many steps as the try before. So N steps lose at most the time of
LOSS steps, of one more draft, of 1 + log2(1 + N / 16) tries, and of the first steps of 2, 4 and 8 rows, whose
times are not known before.
"""

from __future__ import annotations

LOSS = 4.0  # steps without drafts


class Account:
    """`saved_s` is the saved time minus the lost time, in seconds."""

    def __init__(self) -> None:
        self.saved_s = self._lost_s = self._most_s = 0.0  # `_lost_s` counts from the best moment on.

    def begin(self, plain_s: float) -> None:
        """Begin a step, which takes `plain_s` without drafts. Forget the time that tries have lost."""
        self._most_s = LOSS * plain_s
        self._lost_s = min(self._lost_s, self._most_s)

    def spend(self, seconds: float) -> None:
        """Count the time of a draft."""
        self._lost_s += seconds
        self.saved_s -= seconds

    def invest(self, seconds: float) -> None:
        """Count time that makes later drafts better. The caller limits this time before spending it."""
        self.saved_s -= seconds

    def earn(self, seconds: float) -> None:
        """Count the time of decoding the accepted tokens without drafts."""
        self._lost_s = max(0.0, self._lost_s - seconds)
        self.saved_s += seconds

    @property
    def is_even(self) -> bool:
        """Return whether drafts have lost no time since the best moment."""
        return self._lost_s == 0.0

    @property
    def is_spent(self) -> bool:
        """Return whether only tries may be verified."""
        return self._lost_s >= self._most_s
