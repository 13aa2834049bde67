"""An automatic split includes scratch memory in its budget. If the model does not fit, the error names shares
with which the model would fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from runners import load_runner

from vkbackend.errors import OutOfDeviceMemory
from vkbackend.meta import rates
from vkbackend.meta.known_speed import Speed
from vkbackend.models.engine.runner import loading
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.placement import fit

BUDGET = 2_600_000  # bytes for weights, caches and scratch; the model needs more than 4/3 of this budget


@pytest.fixture
def budgets(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    room = [1 << 40, 1 << 40]
    speeds = {"numpy.0": Speed(3e9, 1e8), "numpy.1": Speed(1e9, 1e8)}

    def of(_: object) -> list[fit.Budget]:
        return [fit.Budget(f"gpu{d}", nbytes, (d,)) for d, nbytes in enumerate(room)]

    for module in (fit, loading):
        monkeypatch.setattr(module, "budgets_of", of)
    monkeypatch.setattr(rates, "measure_speed", lambda device: speeds[device.name])
    monkeypatch.setattr(rates, "measure_reduce", lambda devices, nbytes: 1e-6)
    monkeypatch.setattr(rates, "class_of", lambda device: device.name)
    monkeypatch.setattr(rates, "resource_of", lambda device: device.name)
    return room


def load_on_two(models: Path, **options: Any) -> Runner:
    path = models / "stories-narrow-F32.gguf"
    return load_runner(path, devices=["numpy"] * 2, n_ctx=1024, type_k="f32", type_v="f32", **options)


def test_scratch_counts_in_the_automatic_split(models: Path, budgets: list[int]) -> None:
    free = load_on_two(models, tensor_split="auto")
    first, second = free.options.tensor_split or ()
    free.close()
    budgets[0] = BUDGET
    tight = load_on_two(models, tensor_split="auto")
    fewer, others = tight.options.tensor_split or ()
    held = tight.memory()[0]
    tight.close()
    assert fewer / others < first / second
    assert held["weights"] + held["kv"] + held["scratch"] <= BUDGET


def test_the_refusal_names_other_shares(models: Path, budgets: list[int]) -> None:
    budgets[:] = BUDGET, BUDGET
    with pytest.raises(OutOfDeviceMemory, match=r"other shares \(-ts 1,1\)"):
        load_on_two(models, tensor_split=(15, 1))
    load_on_two(models, tensor_split=(1, 1)).close()


def test_other_shares_follow_only_the_devices_memory(models: Path, budgets: list[int]) -> None:
    free = load_on_two(models, tensor_split=(3, 1))
    budgets[:] = (int(1.25 * sum(row[home] for home in fit.ON_DEVICE)) for row in free.memory())
    free.close()
    with pytest.raises(OutOfDeviceMemory, match=r"other shares \(-ts (\d+),(\d+)\)") as caught:
        load_on_two(models, tensor_split=(1, 1))
    first, second = map(int, re.findall(r"-ts (\d+),(\d+)", str(caught.value))[0])
    assert first > second
    load_on_two(models, tensor_split=(first, second)).close()
