from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import NamedTuple, Protocol

N_STEPS = 256


class Counters(Protocol):
    @property
    def n_recorded(self) -> int: ...

    @property
    def record_s(self) -> float: ...

    def reduce_stats(self) -> tuple[int, float]: ...


class Mark(NamedTuple):
    """`at` is time.perf_counter(). `n_recorded` counts recorded steps, and `record_s` is the time spent on
    recording."""

    at: float
    n_recorded: int
    record_s: float

    def until(self, later: Mark) -> float:
        """Return the seconds between two marks, minus recording and compiling, because these happen once per
        kind of step."""
        return later.at - self.at - (later.record_s - self.record_s)


class StepCost(NamedTuple):
    """`latency_s` is the time since the engine began to compose the step, including drafting. `step_s` is the
    time since the step began or the previous step ended, whichever is later. If several steps are in flight,
    only `step_s` is the cost of one step."""

    number: int
    step_s: float
    latency_s: float
    n_reduces: int
    reduce_s: float
    recorded: bool


class StepTimes:
    def __init__(self, runner: Counters) -> None:
        self._runner = runner
        self._last: deque[tuple[float, int, int, float]] = deque(maxlen=N_STEPS)
        self._reduced = runner.reduce_stats()
        self._ended = self.mark()
        self.n_steps = 0

    def mark(self) -> Mark:
        return Mark(time.perf_counter(), self._runner.n_recorded, self._runner.record_s)

    def end(self, composed: Mark, began: Mark, n_rows: int) -> StepCost:
        now, since = self.mark(), max(began, self._ended)
        self._ended = now
        before, before_s = self._reduced
        n_reduces, reduce_s = self._reduced = self._runner.reduce_stats()
        n_reduces, reduce_s = n_reduces - before, reduce_s - before_s
        step_s, recorded = since.until(now), since.n_recorded != now.n_recorded
        self._last.append((step_s, n_rows, n_reduces, reduce_s))
        self.n_steps += 1
        return StepCost(self.n_steps, step_s, composed.until(now), n_reduces, reduce_s, recorded)

    def report(self) -> dict[str, float]:
        counts = {
            "n_steps": self.n_steps,
            "n_reduces": self._reduced[0],
            "n_recorded": self._runner.n_recorded,
            "record_ms": 1e3 * self._runner.record_s,
        }
        times = sorted(seconds for seconds, *_ in self._last)
        if not times:
            return counts | {"step_ms_p50": 0.0, "step_ms_p99": 0.0, "step_rows": 0.0, "reduce_us": 0.0}
        n_reduces = sum(n for _, _, n, _ in self._last)
        return counts | {
            "step_ms_p50": 1e3 * median(times),
            "step_ms_p99": 1e3 * times[min(len(times) - 1, round(0.99 * len(times)))],
            "step_rows": sum(rows for _, rows, _, _ in self._last) / len(self._last),
            "reduce_us": 1e6 * sum(s for *_, s in self._last) / n_reduces if n_reduces else 0.0,
        }
