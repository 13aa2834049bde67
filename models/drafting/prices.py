"""Chooses a verify step's number of rows from measured step times and learned acceptance."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

ROWS = (1, 2, 4, 8)  # Steps are padded to these numbers of rows.
N_TIMES = 32  # The price is the lower quartile of this many times, so delayed steps do not count.
SELDOM = 8  # After N_TIMES times, only every eighth time updates the price, which saves sorting.
FEW = 8  # With fewer times, a size may seem fast only because steps of other sizes were delayed.
SURE = 16  # After this many steps, a draft model may compute a prompt.
REFRESH = 256  # A time is measured again after this many steps.
ROW_SHARE = 0.03  # An unmeasured step is assumed to take only this share longer per row.
CHANGE = 0.01  # Smaller changes of a time do not change the prices.
GAIN = 1.03  # Drafts must produce this many times the tokens per second of plain decoding.


class Recent:
    """The lower quartile of the last N_TIMES times, or 0 before the first. On a busy machine, the minima of
    all sizes are almost equal, although large steps take longer."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=N_TIMES)
        self.seconds, self.n_added = 0.0, 0
        self.least = float("inf")  # of all times

    def add(self, seconds: float) -> None:
        self._last.append(seconds)
        self.n_added += 1
        self.least = min(self.least, seconds)
        if len(self._last) < N_TIMES or self.n_added % SELDOM == 0:
            self.seconds = sorted(self._last)[len(self._last) // 4]

    def forget(self) -> None:
        self._last.clear()


class StepPrices:
    """Seconds of decoding steps by padded number of rows, measured while the model runs. The tables are
    computed when a time changes, because every step reads them."""

    def __init__(self) -> None:
        self._times: dict[int, Recent] = {}
        self._measured_at: dict[int, int] = {}
        self._seen: set[int] = set()
        self._n_steps = 0
        self._priced: dict[int, float] = {}  # the times in the tables
        self._tables: tuple[dict[int, float], dict[int, float]] = {}, {}

    def learn(self, n_rows: int, seconds: float) -> None:
        """Learn from the time of a step. Call this only for steps whose commands had been recorded before.
        The first step of a size is left out if it took longer per row than steps of one row, because some
        drivers compile then. A new time replaces times that are too old."""
        self._n_steps += 1
        if n_rows > ROWS[-1]:
            return
        rows = padded(n_rows)
        if rows not in self._seen:
            self._seen.add(rows)
            if seconds > n_rows * self._tables[0].get(1, 0.0):
                return
        times = self._times.setdefault(rows, Recent())
        if self.is_old(rows):
            times.forget()
        times.add(seconds)
        self._measured_at[rows] = self._n_steps
        change = abs(times.seconds - self._priced.get(rows, 0.0))
        if change > CHANGE * times.seconds or times.n_added <= FEW or self._n_steps % REFRESH == 0:
            self._priced = {r: t.seconds for r, t in self._times.items()}
            few = {r for r, t in self._times.items() if t.n_added < FEW}
            recent = {r: t for r, t in self._priced.items() if not self.is_old(r)}
            self._tables = _table(self._priced, few), _table(recent, few)

    def seconds(self, n_rows: int, hopeful: bool = False) -> float | None:
        """Return a step's time, or None if no step has been measured. An unmeasured time is an optimistic
        estimate. If `hopeful`, an old time is estimated as well. Fewer rows never take longer than more rows,
        so a time that was measured under load is corrected by times of larger steps. A size with few measured
        times is assumed to take longer than smaller sizes."""
        return self._tables[hopeful].get(padded(n_rows))

    def known(self, n_rows: int, hopeful: bool = False) -> float:
        seconds = self.seconds(n_rows, hopeful)
        assert seconds is not None
        return seconds

    def least(self, n_rows: int) -> float:
        """Return the shortest measured time of a step. Other programs caused the longer times."""
        times = self._times.get(padded(n_rows))
        return times.least if times else self.known(n_rows)

    def is_measured(self, n_rows: int) -> bool:
        return padded(n_rows) in self._times

    def is_sure(self, n_rows: int) -> bool:
        """Return whether the time was measured often enough to spend much time on a draft."""
        return self.is_measured(n_rows) and self._times[padded(n_rows)].n_added >= SURE

    def is_old(self, n_rows: int) -> bool:
        rows = padded(n_rows)
        return rows in self._measured_at and self._n_steps - self._measured_at[rows] >= REFRESH


def _table(times: Mapping[int, float], few: Set[int]) -> dict[int, float]:
    """Return the time of each number of rows from measured times. `few` contains the sizes that were measured
    rarely."""
    table: dict[int, float] = {}
    for rows in ROWS if times else ():
        larger = [seconds for r, seconds in times.items() if r > rows and r not in few]
        below = max([r for r in times if r < rows], default=0)
        grown = times[below] * (1 + ROW_SHARE * (rows - below)) if below else 0.0
        if rows in times:
            own = max(times[rows], grown) if rows in few else times[rows]
        else:
            own = grown or times[min(times)] * rows / min(times)
        table[rows] = min([own, *larger])
    return table


PADDED = tuple(next(rows for rows in ROWS if rows >= n) for n in range(ROWS[-1] + 1))


def padded(n_rows: int) -> int:
    return PADDED[min(n_rows, ROWS[-1])]


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

    Without drafts, the step has `n_rows` rows of `n_sequences` sequences. With drafts, `most` is the limit.
    `survivals[i][j]` is the probability that the first j + 1 tokens of draft i are accepted. The step's
    padding is filled with drafted tokens. If `tries` is set and no draft saves time, try the next larger
    step. Or try a step whose time is old, if the step would save time at its assumed time.
    """
    lengths = [0] * len(survivals)
    plain = prices.seconds(n_rows)
    if plain is None:
        return lengths
    if not tries:  # Most drafts that save no time are refused here, before drafts are compared.
        most_tokens = n_sequences + sum([sum(draft) for draft in survivals])
        if most_tokens * plain <= GAIN * n_sequences * prices.known(n_rows + 1):
            return lengths
    chances = [(chance, -j, i) for i, draft in enumerate(survivals) for j, chance in enumerate(draft)]
    chances.sort(reverse=True)
    sizes = [n for rows in ROWS if (n := min(min(rows, most) - n_rows, len(chances))) > 0]

    def value(n: int, hopeful: bool = False) -> float:
        tokens = n_sequences + sum(chance for chance, _, _ in chances[:n])
        return tokens / prices.known(n_rows + n, hopeful) / (GAIN if n else 1.0)

    best = max([0, *sizes], key=value)
    if best:  # an old time is measured again only if drafts save time
        best = max(sizes, key=lambda n: value(n, True))
    elif tries and sizes:
        best = max(sizes, key=lambda n: value(n, True))
        if not (prices.is_old(n_rows + best) and value(best, True) > value(0)):
            best = sizes[0]
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
    times = {rows: (prices.known(rows), prices.known(rows, True)) for rows in ROWS if rows >= n_rows}
    plain = prices.known(n_rows) / n_sequences
    best_s = plain / GAIN
    best, hoped, hoped_s = 0, 0, float("inf")
    tokens, chance = float(n_sequences), float(n_sequences)
    for n in range(1, (most - n_rows) // n_sequences + 1):
        chance *= rate
        tokens += chance
        known, hopeful = times[padded(n_rows + n * n_sequences)]
        if (per_token := (known + n * seconds) / tokens) < best_s:
            best, best_s = n, per_token
        if (per_token := (hopeful + n * seconds) / tokens) < hoped_s:
            hoped, hoped_s = n, per_token
    return Length(hoped if best else 0, plain - best_s if best else 0.0)
