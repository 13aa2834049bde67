"""A device's known speed determines how its recordings are divided into submissions. Recording a step looks
up the speed and never measures it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from device_sets import MULTI, wide
from prefills import prefill
from runners import load_runner

from vkbackend.errors import OutOfDeviceMemory
from vkbackend.meta import known_speed, speed
from vkbackend.meta.known_speed import TRUSTED, Speed, key_of, pace_of, remember
from vkbackend.meta.step_kind import StepKind
from vkbackend.models.engine.runner import loading
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.options import Options
from vkbackend.recording import FIRST_HEAD, SLOW, Cut, Dispatch, Pace
from vkbackend.runtime import Device
from vkbackend.tools.measure.simulated import Hollow, SimulatedDevice
from vkbackend.twins.device import NumpyDevice

TOKENS = list(range(3, 15))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache folder, and make every measurement fail."""

    def refuse(device: Device) -> Device:
        raise AssertionError(f"{device.name} is measured")

    monkeypatch.setattr(speed, "_twin", refuse)
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.no_vulkan
def test_the_pace_is_a_part_of_the_known_speed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = NumpyDevice("a")
    assert known_speed.known_speed(device) is None and pace_of(device) == SLOW
    remember(f"speed {key_of(device)}", [8e11, 2e10])
    assert known_speed.known_speed(device) == speed.measure_speed(device) == Speed(8e11, 2e10)
    assert pace_of(device) == Pace(TRUSTED * 8e11, TRUSTED * 2e10)
    # VKBACKEND_FLOOR selects other kernels, whose speed is unknown
    monkeypatch.setenv("VKBACKEND_FLOOR", "1")
    assert pace_of(device) == SLOW


def stepped(models: Path, devices: list[str]) -> tuple[np.ndarray, list[int], bool]:
    """Return the logits of a prompt, each device's number of cuts between submissions, and whether attention
    heads are divided among dispatches."""
    runner = load_runner(models / "stories-narrow-F32.gguf", devices=devices, n_ctx=32, n_ubatch=16)
    try:
        return prefill(runner, TOKENS), cuts(runner), bool(max(first_heads(runner)))
    finally:
        runner.close()


def cuts(runner: Runner) -> list[int]:
    n = [0] * len(runner.mesh.devices)
    for step in runner.mesh.steps.by_kind.values():
        for d, executable in enumerate(step.executables):
            n[d] += sum(isinstance(c, Cut) for c in executable.recording.commands)
    return n


def first_heads(runner: Runner) -> list[int | float]:
    executables = [e for step in runner.mesh.steps.by_kind.values() for e in step.executables]
    pushes = [dict(c.push) for e in executables for c in e.recording.commands if isinstance(c, Dispatch)]
    return [push[FIRST_HEAD] for push in pushes if FIRST_HEAD in push]


@pytest.mark.parametrize("devices", [p if p.id == "0,0" else wide(p) for p in MULTI[::2]])
def test_a_step_that_is_cut_gives_the_same_bits(
    models: Path, devices: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "measure_gpus", lambda _: None)
    want, none, shared_out = stepped(models, devices)
    assert not any(none) and not shared_out, "nobody's speed is known, and the model is small"
    runner = load_runner(models / "stories-narrow-F32.gguf", devices=devices, n_ctx=32)
    keys = {f"speed {key_of(device)}" for device in runner.mesh.devices}
    runner.close()
    n_cuts = []
    for rate in (1e4, 1e6, 1e12):
        for key in keys:
            remember(key, [rate, rate])
        got, n, shared_out = stepped(models, devices)
        assert np.array_equal(got, want)
        n_cuts.append(n)
        assert (rate == 1e4) == shared_out, "attention goes in parts where a submission would be too long"
    slow, medium, fast = (np.array(n) for n in n_cuts)
    assert (slow > medium).all() and (medium > fast).all() and not fast.any(), n_cuts


# ---- GPUs are measured before they load ----


@pytest.mark.no_vulkan
def test_a_gpu_is_measured_before_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt runs through a model of eight billion weights, on a GPU of unknown speed and on a GPU that
    reads 800 GB/s."""
    monkeypatch.setenv("VKBACKEND_CACHE", "off")
    monkeypatch.setattr(speed, "measure_speed", lambda device: pytest.fail("measured at every start"))
    unknown = cuts_of_a_prompt()
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))
    asked = []

    def measured(device: Device) -> None:
        asked.append(device.name)
        remember(f"speed {key_of(device)}", [8e11, 2e10])

    monkeypatch.setattr(speed, "measure_speed", measured)
    known = cuts_of_a_prompt()
    assert asked == ["card0"] and unknown > 10 * known


def cuts_of_a_prompt() -> int:
    options = Options.of("x", n_ctx=4096, n_ubatch=512, use_mmap=False)
    card = SimulatedDevice(0, 24 << 30)
    runner = Runner(options, Hollow("llama-8b:Q4_K", 8, 4096), devices=[card])
    try:
        step = runner.mesh.recorded_step(StepKind.of_run(512, 1))
        return sum(isinstance(c, Cut) for c in step.executables[0].recording.commands)
    finally:
        runner.close()


@pytest.mark.no_vulkan
def test_the_speed_of_a_full_device_is_not_stored(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(device: Device) -> None:
        raise OutOfDeviceMemory("full")

    monkeypatch.setattr(speed, "measure_speed", full)
    card = SimulatedDevice(0, 8 << 30)
    speed.measure_gpus([card, NumpyDevice("a")])
    assert pace_of(card) == SLOW
