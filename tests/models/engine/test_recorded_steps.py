from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import DEVICE_SETS
from state_models import open_runner

from vkbackend.meta import recorded_steps
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.step import Run

SIZES = [1, 2, 5, 1, 9, 2, 1]  # four kinds of steps


def last_logits(runner: Runner, n: int) -> np.ndarray:
    return runner.step(list(range(3, 3 + n)), [Run(0, 0, n, 0)], [n - 1]).copy()


def live(runner: Runner) -> list[Any]:
    return [(dict(device.counts), dict(device.nbytes)) for device in runner.mesh.devices]


def recorded_sizes(runner: Runner) -> list[int]:
    return sorted(kind.n_rows for kind in runner.mesh.steps.by_kind if kind.n_outputs)


@pytest.mark.parametrize("devices", [p for p in DEVICE_SETS if p.id == "0,0"])
def test_unused_steps_are_replaced(models: Path, devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = open_runner(models, devices)
    want = {n: last_logits(runner, n) for n in sorted(set(SIZES))}
    all_of_them = live(runner)
    runner.close()
    assert all(not device.counts for device in runner.mesh.devices)

    monkeypatch.setattr(recorded_steps, "MAX_NBYTES", 1)
    monkeypatch.setattr(recorded_steps, "MIN_STEPS", 2)
    runner = open_runner(models, devices)
    for n in SIZES:
        assert np.array_equal(last_logits(runner, n), want[n])
        assert len(runner.mesh.steps.by_kind) <= 2
    assert recorded_sizes(runner) == [1, 2], "those used last"
    few = live(runner)
    for n in SIZES:
        last_logits(runner, n)
    assert live(runner) == few
    assert all(
        a[0]["VkDescriptorPool"] < b[0]["VkDescriptorPool"] for a, b in zip(few, all_of_them, strict=True)
    )
    runner.close()
    assert all(not device.counts for device in runner.mesh.devices)


def test_the_limit_on_commands_limits_the_steps(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = open_runner(models, ["numpy"] * 2)
    last_logits(runner, 1)
    nbytes = next(iter(runner.mesh.steps.by_kind.values())).nbytes
    assert nbytes > 100_000
    monkeypatch.setattr(recorded_steps, "MIN_STEPS", 1)
    monkeypatch.setattr(recorded_steps, "MAX_NBYTES", 3 * nbytes + 3 * nbytes // 4)
    for n in (2, 5, 9):
        last_logits(runner, n)
    assert recorded_sizes(runner) == [2, 8, 12]
    last_logits(runner, 2)
    last_logits(runner, 1)
    assert recorded_sizes(runner) == [1, 2, 12], "2 was used again, 8 was not"
    runner.close()


def test_the_limit_of_software_drivers_has_no_least_number_of_steps(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = open_runner(models, ["0"])
    last_logits(runner, 1)
    steps = runner.mesh.steps
    n_commands = steps.n_cpu_commands
    assert n_commands > 10 and steps.by_kind
    monkeypatch.setattr(recorded_steps, "MAX_CPU_COMMANDS", 3 * n_commands)
    for n in (2, 5, 9, 2):
        last_logits(runner, n)
        assert steps.n_cpu_commands <= recorded_steps.MAX_CPU_COMMANDS
    assert 1 < len(steps.by_kind) < recorded_steps.MIN_STEPS and recorded_sizes(runner)[0] == 2
    n_steps = len(steps.by_kind)
    while runner.record_ahead(lambda: False):
        pass
    assert len(steps.by_kind) == n_steps, "more than half of the commands are in use"
    runner.close()
