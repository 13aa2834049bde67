"""Chooses the number of prompt rows in a decoding step. The prompt rows may double the step's time.

The time per row depends on device, model, depth and padding. The number of rows therefore grows while steps
are fast enough, and shrinks after a slow step.
"""

from __future__ import annotations

from vkbackend.meta.step_kind import bucket

SLOWER = 2.0  # Limit of a step's time, relative to a step without prompt rows.
GROWTH = 1.15  # After a fast step, multiply the prompt rows by this.
WEIGHT = 0.25
REFRESH = 64  # A step without prompt rows is measured again after this many steps.
EVERY = 8  # A decode-only step is measured once in this many steps.
FIRST_ROWS = 8
PADDED = 16  # Steps with PADDED or more prompt rows have no padding.


class PrefillBudget:
    def __init__(self) -> None:
        self._alone: dict[int, float] = {}  # seconds of a decode-only step, by its padded number of rows
        self._age: dict[int, int] = {}
        self._rows = float(FIRST_ROWS)
        self._n_steps = 0

    def rows(self, n_decode: int, most: int) -> int:
        if not n_decode:
            return most
        kind = bucket(n_decode)
        if kind not in self._alone or self._age[kind] >= REFRESH:
            self._n_steps = -1
            return 0
        self._age[kind] += 1
        n = max(1, int(self._rows))
        if n >= PADDED:
            n = max(_below(n_decode + n) - n_decode, PADDED // 2)
        return min(most, n)

    def took(self, n_decode: int, n_prompt: int, seconds: float) -> None:
        """Adjust the limit to the time of a step that was already recorded."""
        self._n_steps += 1
        if not n_decode or not (
            n_prompt or self._n_steps % EVERY == 0 or bucket(n_decode) not in self._alone
        ):
            return
        kind = bucket(n_decode)
        known = self._alone.get(kind)
        if not n_prompt:
            self._alone[kind] = seconds if known is None else known + WEIGHT * (seconds - known)
            self._age[kind] = 0
        elif known is not None and seconds > SLOWER * known:
            # The step may be slow for another reason, so at most halve the number.
            self._rows = max(1.0, self._rows * max(0.5, SLOWER * known / seconds))
        # A step with fewer prompt rows had only short prompts, so the limit does not grow.
        elif known is not None and n_prompt >= int(self._rows) // 2:
            self._rows = min(self._rows * GROWTH, 1e4)


def _below(n: int) -> int:
    power = 1 << n.bit_length() - 1
    return power * 3 // 2 if power >= 8 and n >= power * 3 // 2 else power
