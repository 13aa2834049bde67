"""Bounds the time that drafts may lose, however bad the guesses and however slow the steps are.

A draft costs the time to compute it, and the time of the additional rows of a step. It saves the time of
decoding the accepted tokens. The best moment is when drafts had saved the most time. When drafts have lost
the time of LOSS steps since then, drafts are verified only as tries, and the number of steps between tries
doubles. So N steps lose at most the time of LOSS steps, one more draft, 1 + log2(1 + N / 16) tries, and the
first steps of 2, 4 and 8 rows, whose times are not known before.
"""

from __future__ import annotations

LOSS = 4.0  # steps without drafts


class Account:
    """`saved_s` is the saved time minus the lost time, in seconds."""

    def __init__(self) -> None:
        self.saved_s = self._lost_s = self._most_s = 0.0  # `_lost_s` counts from the best moment on.

    def begin(self, plain_s: float) -> None:
        """Begin a step that takes `plain_s` seconds without drafts. Tries may have lost more than the time of
        LOSS steps; the excess is forgotten."""
        self._most_s = LOSS * plain_s
        self._lost_s = min(self._lost_s, self._most_s)

    def spend(self, seconds: float) -> None:
        self._lost_s += seconds
        self.saved_s -= seconds

    def invest(self, seconds: float) -> None:
        """Count time that makes later drafts better. The caller limits this time before spending it."""
        self.saved_s -= seconds

    def earn(self, seconds: float) -> None:
        """Count saved time: decoding the accepted tokens without drafts would take `seconds`."""
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
