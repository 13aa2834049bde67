"""Chooses the number of prompt rows in a decoding step. The prompt rows may double the step's time. If n
prompts wait while m < n sequences decode, the rows may take n / m times the time of a decode-only step. Then
a prompt gets as much time as a decoding sequence. If all prompts can end within PAUSE_S seconds, they are not
cut, because cutting delays their first tokens and gives decoding sequences nothing.

The time per row depends on device, model, depth and padding. The number of rows therefore grows while steps
are fast enough, and shrinks after a slow step.
"""

from __future__ import annotations

from collections.abc import Sequence

from vkbackend.meta.step_kind import bucket

# After a step, the number of prompt rows changes by at most this factor, because the step may be slow for
# another reason.
GROWTH = 1.25
WEIGHT = 0.25
REFRESH = 64  # A step without prompt rows is measured again after this many steps.
EVERY = 8  # A decode-only step is measured once in this many steps.
FIRST_ROWS = 8
PADDED = 16  # Steps with PADDED or more prompt rows have no padding.
PAUSE_S = 0.2
MAX_ROWS = 1e4
MAX_SHARE = 8  # At most, prompts take this many times the time of a decode-only step.


class PrefillBudget:
    def __init__(self) -> None:
        self._alone: dict[int, float] = {}  # seconds of a decode-only step, by its padded number of rows
        self._age: dict[int, int] = {}
        self._rows = float(FIRST_ROWS)  # rows that take as long as a decode-only step
        self._prompt = 0, 0.0  # rows and seconds of the latest step without decoding sequences
        self._is_learned = False
        self._n_steps = 0

    def rows(self, n_decode: int, most: int, waiting: Sequence[int]) -> int:
        """Return how many prompt rows, at most `most`, a step may have with `n_decode` decoding sequences.
        `waiting` lists how many rows of each prompt are left."""
        if not n_decode:
            return most
        kind = self._measured(n_decode)
        if kind is None or self._age[kind] >= REFRESH:
            self._n_steps = -1
            return 0
        self._age[kind] += 1
        if sum(waiting) * self._alone[kind] <= PAUSE_S * self._rows:
            return min(most, sum(waiting))
        n = max(1, int(self._rows * min(max(1, len(waiting) / n_decode), MAX_SHARE)))
        if n >= PADDED:
            n = max(_below(n_decode + n) - n_decode, PADDED // 2)
        return min(most, n)

    def _measured(self, n_decode: int) -> int | None:
        """Return the padded number of rows of the measured decode-only step with n_decode rows, or else of
        the largest smaller one. A smaller step takes no longer, so its time is a safe limit."""
        return max((kind for kind in self._alone if kind <= bucket(n_decode)), default=None)

    def took(self, n_decode: int, n_prompt: int, seconds: float) -> None:
        """Adjust the limit to the time of a step. Call this only for steps whose commands had been recorded
        before."""
        self._n_steps += 1
        if not n_decode:
            self._prompt = n_prompt, seconds
            return
        kind = bucket(n_decode)
        if not n_prompt:
            known = self._alone.get(kind)
            if known is None or self._n_steps % EVERY == 0:
                self._alone[kind] = seconds if known is None else known + WEIGHT * (seconds - known)
                self._age[kind] = 0
            if not self._is_learned and self._prompt[0]:
                self._rows = max(FIRST_ROWS, self._rows_of(seconds, self._prompt[0], self._prompt[1]))
            return
        if (measured := self._measured(n_decode)) is None:
            return
        self._is_learned = True
        known, share = self._alone[measured], max(1, n_prompt / self._rows)
        rows = self._rows_of(known, n_prompt, seconds)
        if seconds > (1 + share) * known:
            self._rows = max(1.0, rows, self._rows / GROWTH)
        # A step with fewer prompt rows had only short prompts, so the limit does not grow.
        elif n_prompt >= int(self._rows) // 2:
            self._rows = max(self._rows, min(rows, self._rows * GROWTH))

    def _rows_of(self, known: float, n_prompt: int, seconds: float) -> float:
        """Return how many rows add `known` seconds to a step, if `n_prompt` rows made it take `seconds`
        instead of `known`. With a coarse clock, `seconds` may be 0."""
        if not seconds:
            return MAX_ROWS
        return min(known * n_prompt / max(seconds - known, seconds / 16), MAX_ROWS)


def _below(n: int) -> int:
    power = 1 << n.bit_length() - 1
    return power * 3 // 2 if power >= 8 and n >= power * 3 // 2 else power
