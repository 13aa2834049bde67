"""How long the last steps took, and the all-reduces in them."""

from __future__ import annotations

from collections import deque
from statistics import median

N_STEPS = 256  # the last ones, which are reported


class StepTimes:
    def __init__(self) -> None:
        self._last: deque[tuple[float, int, int, float]] = deque(maxlen=N_STEPS)

    def add(self, seconds: float, n_rows: int, n_reduces: int, reduce_s: float) -> None:
        self._last.append((seconds, n_rows, n_reduces, reduce_s))

    def report(self) -> dict[str, float]:
        """Milliseconds of the last steps, their rows, and host microseconds of one all-reduce."""
        times = sorted(seconds for seconds, *_ in self._last)
        if not times:
            return {"step_ms_p50": 0.0, "step_ms_p99": 0.0, "step_rows": 0.0, "reduce_us": 0.0}
        n_reduces = sum(n for _, _, n, _ in self._last)
        return {
            "step_ms_p50": 1e3 * median(times),
            "step_ms_p99": 1e3 * times[min(len(times) - 1, round(0.99 * len(times)))],
            "step_rows": sum(rows for _, rows, _, _ in self._last) / len(self._last),
            "reduce_us": 1e6 * sum(s for *_, s in self._last) / n_reduces if n_reduces else 0.0,
        }
