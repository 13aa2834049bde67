from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from fake_runner import FakeRunner
from scheduling import GREEDY, Everything, finish

from vkbackend.models.engine.engine import Engine
from vkbackend.models.engine.messages import Generate
from vkbackend.step import Run

pytestmark = pytest.mark.no_vulkan
RECORDING_S, STEP_S = 2.0, 0.01


class Clocked(FakeRunner):
    """A fake runner whose steps advance a clock. Each step takes STEP_S. Recording makes the first step
    longer by RECORDING_S."""

    now = 0.0

    def step(self, tokens: Sequence[int], runs: Sequence[Run], outputs: Sequence[int]) -> np.ndarray:
        if not self.steps:
            self.now += RECORDING_S
            self.n_recorded, self.record_s = 1, RECORDING_S
        self.now += STEP_S
        return super().step(tokens, runs, outputs)


def test_timings_exclude_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[float] = []

    class Told(Everything):
        def took(self, n_decode: int, n_prompt: int, seconds: float) -> None:
            times.append(seconds)

    runner = Clocked(n_slots=1)
    monkeypatch.setattr(time, "perf_counter", lambda: runner.now)
    engine = Engine(runner, Told())  # type: ignore[arg-type]
    timings = finish(engine, [Generate(0, (1, 2, 3), 3, GREEDY)])[0][-1].timings
    assert timings is not None
    assert timings.prompt_s == pytest.approx(STEP_S) and timings.decode_s == pytest.approx(2 * STEP_S)
    assert times == pytest.approx([STEP_S] * 2), "the first step is no measure for the budget"
    assert engine.stats()["step_ms_p99"] == pytest.approx(1e3 * STEP_S)
