"""Chooses a verify step's number of rows from measured step times and learned acceptance."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from vkbackend.models.drafting.acceptance import expected_tokens

ROWS = (1, 2, 4, 8)  # Steps are padded to these numbers of rows.
N_TIMES = 5  # The minimum of this many times ignores steps that other work has delayed.
REFRESH = 256  # A time is measured again after this many steps.
ROW_SHARE = 0.03  # Unmeasured steps are assumed to grow by this share per row, so they are tried.


class Recent:
    """The minimum of the last N_TIMES times, or 0 before the first."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=N_TIMES)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self._last.append(seconds)
        self.seconds = min(self._last)

    @property
    def is_sure(self) -> bool:
        return len(self._last) == N_TIMES

    def forget(self) -> None:
        self._last.clear()


class StepPrices:
    """Seconds of decoding steps by padded number of rows, measured while the model runs."""

    def __init__(self) -> None:
        self._times: dict[int, Recent] = {}
        self._measured_at: dict[int, int] = {}
        self._seen: set[int] = set()
        self._n_steps = 0

    def learn(self, n_rows: int, seconds: float) -> None:
        """Count a step that was already recorded. The first step of a size is left out, because some drivers
        compile then. A time replaces old times."""
        self._n_steps += 1
        if n_rows > ROWS[-1]:
            return
        rows = padded(n_rows)
        if rows not in self._seen:
            self._seen.add(rows)
            return
        times = self._times.setdefault(rows, Recent())
        if self.is_old(rows):
            times.forget()
        times.add(seconds)
        self._measured_at[rows] = self._n_steps

    def seconds(self, n_rows: int, hopeful: bool = False) -> float | None:
        """Return a step's time, or None if no step has been measured. An unmeasured time is estimated
        optimistically. If `hopeful`, an old time is, too. Fewer rows never take longer than more rows, so
        times of larger steps correct a time that was measured under load."""
        rows = padded(n_rows)
        times = {r: t.seconds for r, t in self._times.items() if not (hopeful and self.is_old(r))}
        times = times or {r: t.seconds for r, t in self._times.items()}
        if not times:
            return None
        least = [seconds for r, seconds in times.items() if r >= rows]
        below = [r for r in times if r < rows]
        if rows not in times and below:
            nearest = max(below)
            least.append(times[nearest] * (1 + ROW_SHARE * (rows - nearest)))
        elif rows not in times:
            nearest = min(times)
            least.append(times[nearest] * rows / nearest)
        return min(least)

    def known(self, n_rows: int, hopeful: bool = False) -> float:
        """Return `seconds` after a step has been measured."""
        seconds = self.seconds(n_rows, hopeful)
        assert seconds is not None
        return seconds

    def is_measured(self, n_rows: int) -> bool:
        return padded(n_rows) in self._times

    def is_sure(self, n_rows: int) -> bool:
        """Return whether the time was measured several times."""
        return self.is_measured(n_rows) and self._times[padded(n_rows)].is_sure

    def is_old(self, n_rows: int) -> bool:
        """Return whether the measured time is old."""
        rows = padded(n_rows)
        return rows in self._measured_at and self._n_steps - self._measured_at[rows] >= REFRESH


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
    tried, or a larger step whose time is old.
    """
    lengths = [0] * len(survivals)
    if prices.seconds(n_rows) is None:
        return lengths
    chances = [(chance, -j, i) for i, draft in enumerate(survivals) for j, chance in enumerate(draft)]
    chances.sort(reverse=True)
    sizes = [n for rows in ROWS if (n := min(min(rows, most) - n_rows, len(chances))) > 0]

    def value(n: int, hopeful: bool = False) -> float:
        tokens = n_sequences + sum(chance for chance, _, _ in chances[:n])
        return tokens / prices.known(n_rows + n, hopeful)

    best = max([0, *sizes], key=value)
    if best:  # an old time is measured again only if drafts pay
        best = max(sizes, key=lambda n: value(n, True))
    elif tries and sizes:
        best = next((n for n in sizes if prices.is_old(n_rows + n)), sizes[0])
    for _, _, i in chances[:best]:
        lengths[i] += 1
    return lengths


class Length(NamedTuple):
    """A draft of `n` tokens per sequence, which saves `saved_s` seconds per token of a sequence."""

    n: int
    saved_s: float


def best_length(
    n_rows: int, n_sequences: int, rate: float, prices: StepPrices, most: int, seconds: float
) -> Length:
    """Return how many tokens to draft for each sequence to maximize the tokens per second. A drafted token
    takes `seconds`. Each token is accepted with probability `rate`."""
    plain = prices.known(n_rows) / n_sequences

    def per_token(n: int, hopeful: bool = False) -> float:
        rows, tokens = n_rows + n * n_sequences, n_sequences * expected_tokens(rate, n)
        return (prices.known(rows, hopeful) + n * seconds) / tokens if n else plain

    lengths = range((most - n_rows) // n_sequences + 1)
    best = min(lengths, key=per_token)
    saved = plain - per_token(best)
    if best:
        best = min(lengths[1:], key=lambda n: per_token(n, True))
    return Length(best, saved)
