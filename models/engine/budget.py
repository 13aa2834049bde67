"""How many rows of prompts a step computes while other sequences decode: as many as make the step about twice
as long. The cost of a row depends on device, model, depth and padding, so the number is found by trying: it
grows while steps are fast enough, and shrinks when one is not.
"""

from __future__ import annotations

from vkbackend.meta.step_kind import bucket

SLOWER = 2.0  # a step with rows of prompts may take this many times as long as one without
GROWTH = 1.15  # factor for the number of rows after a step that was fast enough
WEIGHT = 0.25  # of a new measurement of a step without rows of prompts
REFRESH = 64  # after this many steps, a step without rows of prompts is measured again
EVERY = 8  # of so many steps that only decode, one is measured: there are many
FIRST_ROWS = 8
PADDED = 16  # from this many rows on, fill a bucket exactly: padding would cost too much


class PrefillBudget:
    """`rows` says how many rows of prompts a step gets, and `took` learns how long the step was."""

    def __init__(self) -> None:
        self._alone: dict[int, float] = {}  # seconds of a step, by its decoding rows as they are padded
        self._age: dict[int, int] = {}  # steps since it was measured
        self._rows = float(FIRST_ROWS)
        self._n_told = 0

    def rows(self, n_decode: int, most: int) -> int:
        """Rows of prompts, at most `most`, for a step with so many decoding rows."""
        if not n_decode:
            return most
        kind = bucket(n_decode)
        if kind not in self._alone or self._age[kind] >= REFRESH:
            self._n_told = -1  # the next step is measured
            return 0
        self._age[kind] += 1
        n = max(1, int(self._rows))
        if n >= PADDED:
            n = max(_below(n_decode + n) - n_decode, PADDED // 2)
        return min(most, n)

    def took(self, n_decode: int, n_prompt: int, seconds: float) -> None:
        """A step of so many rows took so long. Callers leave out a step that had to be recorded first."""
        self._n_told += 1
        if not n_decode or not (n_prompt or self._n_told % EVERY == 0 or bucket(n_decode) not in self._alone):
            return
        kind = bucket(n_decode)
        known = self._alone.get(kind)
        if not n_prompt:
            self._alone[kind] = seconds if known is None else known + WEIGHT * (seconds - known)
            self._age[kind] = 0
        elif known is not None and seconds > SLOWER * known:
            # A step that waited for something else would stop prompts for long if it counted fully.
            self._rows = max(1.0, self._rows * max(0.5, SLOWER * known / seconds))
        elif known is not None and n_prompt >= int(self._rows) // 2:  # else there were no more to compute
            self._rows = min(self._rows * GROWTH, 1e4)


def _below(n: int) -> int:
    """The largest bucket that is not above n."""
    power = 1 << n.bit_length() - 1
    return power * 3 // 2 if power >= 8 and n >= power * 3 // 2 else power
