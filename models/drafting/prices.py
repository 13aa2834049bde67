"""Chooses the number of rows of a verify step from measured times of steps and learned acceptance."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from vkbackend.models.drafting.acceptance import expected_tokens

ROWS = (1, 2, 4, 8)  # Steps are padded to these numbers of rows.
N_TIMES = 5  # The median of this many times ignores steps that something else has delayed.
REFRESH = 256  # A time is measured again after this many steps.
ROW_SHARE = 0.03  # Unmeasured steps are assumed to grow by this share per row, so they are tried.


class StepPrices:
    """Seconds of decoding steps by padded number of rows, measured while the model runs."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._measured_at: dict[int, int] = {}
        self._seen: set[int] = set()
        self._n_steps = 0

    def learn(self, n_rows: int, seconds: float) -> None:
        """Count a step whose recording existed. The first step of a size is left out, because some drivers
        compile then."""
        self._n_steps += 1
        if n_rows > ROWS[-1]:
            return
        rows = padded(n_rows)
        if rows not in self._seen:
            self._seen.add(rows)
            return
        self._times.setdefault(rows, deque(maxlen=N_TIMES)).append(seconds)
        self._measured_at[rows] = self._n_steps
        for old in [r for r, at in self._measured_at.items() if self._n_steps - at >= REFRESH]:
            del self._times[old], self._measured_at[old]

    def seconds(self, n_rows: int) -> float | None:
        """Return a step's measured or optimistic time, or None if no step has been measured."""
        rows = padded(n_rows)
        if rows in self._times:
            return median(self._times[rows])
        if not self._times:
            return None
        below = [r for r in self._times if r < rows]
        if below:
            nearest = max(below)
            return median(self._times[nearest]) * (1 + ROW_SHARE * (rows - nearest))
        nearest = min(self._times)
        return median(self._times[nearest]) * rows / nearest

    def known(self, n_rows: int) -> float:
        """Return `seconds` after a step has been measured."""
        seconds = self.seconds(n_rows)
        assert seconds is not None
        return seconds

    def is_measured(self, n_rows: int) -> bool:
        return padded(n_rows) in self._times


def padded(n_rows: int) -> int:
    return next((rows for rows in ROWS if rows >= n_rows), ROWS[-1])


def best_lengths(
    n_rows: int,
    n_sequences: int,
    survivals: Sequence[Sequence[float]],
    prices: StepPrices,
    most: int,
    *,
    tries: bool = False,
) -> list[int]:
    """Return how many tokens of each draft to verify to maximize the tokens per second.

    The step has `n_rows` rows of `n_sequences` sequences without drafts, and at most `most` rows.
    `survivals[i][j]` is the probability that the first j + 1 tokens of draft i are accepted. The step's
    padding is filled with drafted tokens. If `tries` is set and no draft pays, the smallest larger step is
    tried.
    """
    lengths = [0] * len(survivals)
    plain = prices.seconds(n_rows)
    if plain is None:
        return lengths
    chances = [(chance, -j, i) for i, draft in enumerate(survivals) for j, chance in enumerate(draft)]
    chances.sort(reverse=True)
    best, best_value = 0, n_sequences / plain
    for rows in ROWS:
        n = min(min(rows, most) - n_rows, len(chances))
        if n > 0:
            value = (n_sequences + sum(chance for chance, _, _ in chances[:n])) / prices.known(n_rows + n)
            if value > best_value:
                best, best_value = n, value
    if not best and tries and n_rows < most:
        best = max(1, min(padded(n_rows + 1), most) - n_rows)
    for _, _, i in chances[:best]:
        lengths[i] += 1
    return lengths


def best_length(
    n_rows: int, n_sequences: int, rate: float, prices: StepPrices, most: int, seconds: float
) -> int:
    """Return how many tokens to draft for each sequence to maximize the tokens per second. A drafted token
    takes `seconds`. Each token is accepted with probability `rate`."""
    best, best_value = 0, n_sequences / prices.known(n_rows)
    for n in range(1, (most - n_rows) // n_sequences + 1):
        tokens = n_sequences * expected_tokens(rate, n)
        value = tokens / (prices.known(n_rows + n * n_sequences) + n * seconds)
        if value > best_value:
            best, best_value = n, value
    return best
