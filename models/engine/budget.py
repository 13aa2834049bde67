"""How many rows of prompts a step takes beside sequences that decode: so many that the step takes about twice
as long as without them. Both times are measured, as every device, model and depth has its own.
"""

from __future__ import annotations

from vkbackend.meta.sizing import bucket

SLOWER = 2.0  # a step with rows of prompts may take this many times one without
WEIGHT = 0.25  # of a new measurement in the mean
REFRESH = 64  # steps after which the time without rows of prompts is measured again
EVERY = 8  # of the steps that only decode one is looked at: there are many
FIRST_ROWS = 8  # before anything is known
LEAST_ROWS = 4


class PrefillBudget:
    """Tells the rows before a step, and hears how long it took."""

    def __init__(self) -> None:
        self._alone: dict[int, float] = {}  # seconds of a step, by its decoding rows as they are padded
        self._age: dict[int, int] = {}  # steps since it was measured
        self._n_told = 0
        self._row_s = 0.0  # what a row of a prompt adds

    def rows(self, n_decode: int, most: int) -> int:
        """Rows of prompts, at most `most`, for a step with so many decoding rows."""
        if not n_decode:
            return most
        kind = bucket(n_decode)
        alone = self._alone.get(kind)
        if alone is None or self._age[kind] >= REFRESH:
            self._n_told = -1  # the next step is looked at
            return 0
        self._age[kind] += 1
        if not self._row_s:
            return min(most, FIRST_ROWS)
        wanted = n_decode + max(LEAST_ROWS, int((SLOWER - 1) * alone / self._row_s))
        # Rows are padded to a bucket: those up to the next smaller one cost nothing more.
        return min(most, max(_below(wanted) - n_decode, LEAST_ROWS))

    def took(self, n_decode: int, n_prompt: int, seconds: float) -> None:
        """A step of so many rows took so long; one that was recorded first is not told."""
        self._n_told += 1
        if not n_decode or not (n_prompt or self._n_told % EVERY == 0 or bucket(n_decode) not in self._alone):
            return
        kind = bucket(n_decode)
        known = self._alone.get(kind)
        if not n_prompt:
            self._alone[kind] = seconds if known is None else known + WEIGHT * (seconds - known)
            self._age[kind] = 0
        elif known is not None:
            row_s = max(seconds - known, 0.05 * known) / n_prompt
            # One step that waited for something else would stop prompts for long.
            row_s = min(row_s, 4 * self._row_s) if self._row_s else row_s
            self._row_s += (WEIGHT if self._row_s else 1.0) * (row_s - self._row_s)


def _below(n: int) -> int:
    """The largest bucket that is not above n."""
    power = 1 << n.bit_length() - 1
    return power * 3 // 2 if power >= 8 and n >= power * 3 // 2 else power
