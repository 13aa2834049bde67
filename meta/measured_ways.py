"""Measure the fastest way for devices to exchange sums: first the provider for each size, then signals and
depths, then steps that are submitted in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise, product

from vkbackend.errors import OutOfDeviceMemory, PlanError, UnsupportedFeature
from vkbackend.meta.bench import LIMIT_S, REPEATS, time_reduce
from vkbackend.meta.known_speed import reduce_key, remember
from vkbackend.meta.known_ways import ONE_CALL, Ahead, Choice, remember_choice
from vkbackend.meta.options import AHEAD, ReduceOptions
from vkbackend.meta.ways import HOST_WRITTEN, WAYS, can_signal
from vkbackend.runtime import SIGNALS, Device

SIZES = tuple(1 << n for n in range(12, 25, 2))  # 4 KiB to 16 MiB
TOKEN_NBYTES = 1 << 14  # Bytes of a decoded token's sum in a model with 4,096 values per row.
DEPTHS: tuple[Ahead, ...] = (0, 1, 2, None)
BETTER = 0.9  # A way replaces the default if it takes less than this share of the default's time.
# ONE_CALL and events are kept only if so many steps were exact. If 1 % of all steps were wrong, so many exact
# steps would have a probability of 0.99^300 = 5 %. On an H100, 80 % of the steps were wrong that one call had
# submitted.
SURE_STEPS = 300
SURE_S = 15.0  # With GPUs, SURE_STEPS steps take about a second.


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured exchange of `nbytes` by one way. `us` is the median, `n_checked` the number of steps whose
    sums were checked."""

    nbytes: int
    provider: str
    signal: str
    ahead: Ahead
    us: float
    exact: bool
    n_checked: int = 0

    @property
    def is_trial(self) -> bool:
        return is_trial(self.signal, self.ahead)

    @property
    def is_sure(self) -> bool:
        """Whether the sums were exact in as many steps as the way requires."""
        return self.exact and (not self.is_trial or self.n_checked >= SURE_STEPS)

    def joined(self, other: Measured) -> Measured:
        """Return the row of two rounds."""
        us, n_checked = min(self.us, other.us), self.n_checked + other.n_checked
        return replace(self, us=us, exact=self.exact and other.exact, n_checked=n_checked)


def is_trial(signal: str, ahead: Ahead) -> bool:
    """Return whether submissions may already run when the host writes the sums that they read."""
    return ahead == ONE_CALL or "event" in signal


def measure_ways(
    open_again: Callable[[], Sequence[Device]], n_devices: int, sizes: Sequence[int] = SIZES
) -> Iterator[Measured]:
    """Time every way on newly opened devices. First time all providers with the default signal. Then time the
    other signals and depths with the provider that is best for a token's sum, and events and ONE_CALL with
    the providers that allow them. A way that the devices do not support is left out."""
    providers = [way.name for way in WAYS if n_devices >= way.n_tuned]
    of_token: list[Measured] = []
    for nbytes in sizes:
        rows = _in_turns(open_again, nbytes, [(provider, SIGNALS[0], AHEAD) for provider in providers])
        of_token += rows if nbytes == TOKEN_NBYTES else []
        yield from rows
    if best := best_provider(of_token):
        plain = [signal for signal in SIGNALS if can_signal(best, signal)]
        others = [(best, *how) for how in product(plain, DEPTHS) if how != (SIGNALS[0], AHEAD)]
        for provider, signal in product(HOST_WRITTEN, SIGNALS):
            depths = DEPTHS if "event" in signal else (ONE_CALL,)
            others += [(provider, signal, ahead) for ahead in depths]
        yield from _in_turns(open_again, TOKEN_NBYTES, list(dict.fromkeys(others)))


def _in_turns(
    open_again: Callable[[], Sequence[Device]], nbytes: int, ways: Sequence[tuple[str, str, Ahead]]
) -> list[Measured]:
    """Time all ways, then all ways again, and return the faster time of each. Otherwise, the first way would
    seem slower while a GPU raises its clocks, and any way while another program runs."""
    rows: dict[tuple[str, str, Ahead], Measured] = {}
    for way in (*ways, *ways):
        provider, signal, ahead = way
        how = ReduceOptions(
            reduce_type="f32", reduce_provider=provider, reduce_signal=signal, submit_ahead=ahead
        )
        with suppress(UnsupportedFeature, OutOfDeviceMemory, PlanError):
            repeats = SURE_STEPS // 2 if is_trial(signal, ahead) else REPEATS
            limit_s = SURE_S if ahead == ONE_CALL else LIMIT_S
            result = time_reduce(open_again(), nbytes, how, repeats=repeats, limit_s=limit_s)
            row = Measured(nbytes, *way, 1e6 * result.median, result.exact, result.n_checked)
            rows[way] = row.joined(rows[way]) if way in rows else row
    return [*rows.values()]


def best_provider(rows: Sequence[Measured]) -> str:
    """Return the fastest exact provider of rows of one size. If the fastest takes more than BETTER times the
    first exact provider's time, return the first exact provider."""
    rows = [row for row in rows if row.exact]
    if not rows:
        return ""
    fastest = min(rows, key=lambda row: row.us)
    return rows[0].provider if fastest.us > BETTER * rows[0].us else fastest.provider


def choice_of(rows: Sequence[Measured]) -> Choice | None:
    """Return the fastest exact ways, or None if no sum was exact. The way of a size also serves smaller
    sizes, down to the next measured size. The way of the largest size also serves all larger sizes."""
    default = [row for row in rows if (row.signal, row.ahead) == (SIGNALS[0], AHEAD)]
    ways: list[tuple[int, str]] = []
    for nbytes in sorted({row.nbytes for row in default}):
        if name := best_provider([row for row in default if row.nbytes == nbytes]):
            ways = ways[:-1] if ways and ways[-1][1] == name else ways
            ways.append((nbytes, name))
    if not ways:
        return None
    ways[-1] = (1 << 40, ways[-1][1])
    best = Choice(tuple(ways), SIGNALS[0], AHEAD)
    of_token = [row for row in rows if row.nbytes == TOKEN_NBYTES and row.exact and not row.is_trial]
    of_token = [row for row in of_token if row.provider == best.way(TOKEN_NBYTES)]
    usual = next((row for row in of_token if (row.signal, row.ahead) == (SIGNALS[0], AHEAD)), None)
    if usual:
        fastest = min(of_token, key=lambda row: row.us)
        if fastest.us < BETTER * usual.us:
            best, usual = Choice(best.ways, fastest.signal, fastest.ahead), fastest
    trials = [row for row in rows if row.is_trial and row.is_sure]
    if usual and trials:
        fastest = min(trials, key=lambda row: row.us)
        if fastest.us < BETTER * usual.us:
            best = Choice(_with_trial(best, default, fastest), fastest.signal, fastest.ahead)
    return best


def _with_trial(best: Choice, default: Sequence[Measured], trial: Measured) -> tuple[tuple[int, str], ...]:
    """Return the ways of `best` with the trial's provider for its size. A smaller sum takes at most as long,
    so the provider also serves smaller sizes whose measured way takes longer."""
    ways = []
    for row in sorted(default, key=lambda row: row.nbytes):
        if row.nbytes < trial.nbytes and row.provider == best.way(row.nbytes):
            ways.append((row.nbytes, row.provider if row.us <= trial.us else trial.provider))
    ways += [(trial.nbytes, trial.provider), *(way for way in best.ways if way[0] > trial.nbytes)]
    ends = [i for i, (way, after) in enumerate(pairwise(ways)) if way[1] != after[1]]
    return tuple(ways[i] for i in (*ends, -1))


def keep(devices: Sequence[Device], rows: Sequence[Measured], choice: Choice) -> None:
    """Store the choice. For predictions, also store how long its exchange of each size takes."""
    remember_choice(devices, choice)
    for nbytes in {row.nbytes for row in rows}:
        of_size = [row for row in rows if row.nbytes == nbytes and row.provider == choice.way(nbytes)]
        like = [row for row in of_size if (row.signal, row.ahead) == (choice.signal, choice.ahead)]
        if of_size:
            us = (like or of_size)[0].us
            remember(reduce_key(devices, nbytes), [1e-6 * us])
