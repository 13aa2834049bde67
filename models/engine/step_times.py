"""How long the last steps took."""

from __future__ import annotations

from collections import deque
from statistics import median

N_STEPS = 256  # the last ones, which are reported


class StepTimes:
    def __init__(self) -> None:
        self._last: deque[tuple[float, int]] = deque(maxlen=N_STEPS)

    def add(self, seconds: float, n_rows: int) -> None:
        self._last.append((seconds, n_rows))

    def report(self) -> dict[str, float]:
        """Milliseconds of the last steps, and their rows."""
        times = sorted(seconds for seconds, _ in self._last)
        if not times:
            return {"step_ms_p50": 0.0, "step_ms_p99": 0.0, "step_rows": 0.0}
        return {
            "step_ms_p50": 1e3 * median(times),
            "step_ms_p99": 1e3 * times[min(len(times) - 1, round(0.99 * len(times)))],
            "step_rows": sum(rows for _, rows in self._last) / len(self._last),
        }
