"""If a device hangs or is lost, a typed error is raised within the deadline. A new model can be loaded
afterwards.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import MULTI, for_every_runtime, product, some, wide
from runners import load_runner

from vkbackend import faults
from vkbackend.buffer import Home, View
from vkbackend.errors import DeviceLost, OutOfDeviceMemory, Timeout, VkbackendError
from vkbackend.meta import relay
from vkbackend.meta.step_kind import StepKind
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.recording import Recording
from vkbackend.step import Run

TWO, THREE, DRIVERS = (next(p for p in MULTI if p.id == devices) for devices in ("0,0", "0,0,0", "0,1"))
# By default, these tests run only on the native runtime, and test_kompute.py tests the loss of a kompute
# process.
EVERY_IF_ALL = for_every_runtime(TWO, wide=True)


def step(runner: Runner, pos: int = 0) -> np.ndarray:
    return runner.step([5], [Run(0, 0, 1, pos)], [0])


def load(models: Path, devices: list[str], **options: Any) -> Runner:
    return load_runner(models / "stories-narrow-F32.gguf", devices=devices, n_ctx=64, **options)


@contextmanager
def hurry() -> Iterator[None]:
    """Set short deadlines. Use this function only around calls that hang."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VKBACKEND_TIMEOUT", "2")
        patch.setattr(relay, "DRAIN_S", 2.0)
        yield


def works_again(models: Path, devices: list[str]) -> None:
    runner = load(models, devices)
    assert np.isfinite(step(runner)).all()
    runner.close()


# A kompute device does not wait for a semaphore, so test_kompute.py stops its worker instead.
@pytest.mark.native
@pytest.mark.wide
@pytest.mark.parametrize("devices", [TWO, DRIVERS, THREE])
def test_device_that_stops_answering(
    models: Path, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(models, devices)
    step(runner)
    stuck = runner.mesh.devices[1]
    # The device waits for a semaphore value that the host never signals.
    monkeypatch.setattr(stuck.queue, "allow", lambda number: None)
    with hurry():
        with pytest.raises(Timeout, match=stuck.name):
            step(runner, 1)
        with pytest.raises(DeviceLost, match="load it again"):
            step(runner, 2)
        runner.close()
    assert stuck.abandoned and not runner.mesh.devices[0].counts
    works_again(models, devices)
    # The abandoned device must finish, so that the process can end.
    monkeypatch.undo()
    stuck.queue.allow(stuck.queue.submitted)
    assert stuck.queue.wait(stuck.queue.submitted, 10)


@pytest.mark.parametrize("devices", [EVERY_IF_ALL, wide(DRIVERS), wide(THREE)])
def test_lost_device(models: Path, devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load(models, devices)
    step(runner)
    lost = runner.mesh.devices[0]

    def gone() -> int:
        raise DeviceLost(f"{lost.name}: the device was lost")

    monkeypatch.setattr(lost.queue, "completed", gone)
    with pytest.raises(DeviceLost, match=lost.name):
        step(runner, 1)
    monkeypatch.undo()
    with pytest.raises(VkbackendError):
        step(runner, 2)
    runner.close()
    assert all(not d.counts for d in runner.mesh.devices)
    works_again(models, devices)


@pytest.mark.parametrize("devices", [EVERY_IF_ALL, wide(DRIVERS), wide(THREE)])
def test_interrupt_in_the_middle_of_a_step(
    models: Path, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interrupt in the middle of a step, the runner can only be closed. An interrupt in a caller of
    LLM never stops a step, because the engine runs in its own thread."""
    runner = load(models, devices)
    step(runner)
    queue, calls = runner.mesh.devices[1].queue, []

    def interrupt(number: int) -> None:
        calls.append(number)
        if len(calls) == 3:
            raise KeyboardInterrupt
        type(queue).allow(queue, number)

    monkeypatch.setattr(queue, "allow", interrupt)
    with pytest.raises(KeyboardInterrupt):
        step(runner)
    monkeypatch.undo()
    with pytest.raises(DeviceLost, match="interrupted"):
        step(runner, 1)
    runner.close()
    assert all(not d.counts for d in runner.mesh.devices)
    works_again(models, devices)


@pytest.mark.native
def test_a_replay_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that finishes after its deadline can still be closed completely."""
    (device,) = open_devices(["0"])
    view = View(device.buffer(256, Home.STAGING, "words"), 0, (64,))
    recording = Recording("two segments")
    for name in ("first", "second"):
        recording.copy(view.reshape(2, 32).rows(0, 1), view.reshape(2, 32).rows(1, 2), name)
        if name == "first":
            recording.exchange()
    monkeypatch.setattr(device.queue, "allow", lambda number: None)
    with hurry(), pytest.raises(Timeout, match="two segments"):
        device.run(recording)
    monkeypatch.undo()
    assert not device.abandoned
    device.close()
    assert not device.counts


@pytest.mark.parametrize("devices", [EVERY_IF_ALL])
def test_a_step_that_cannot_be_recorded_leaves_nothing(models: Path, devices: list[str]) -> None:
    runner = load(models, devices)
    before = [device.counts.copy() for device in runner.mesh.devices]
    fault = faults.Fault("Vulkan0.1", "vkAllocateCommandBuffers", 1, "VK_ERROR_OUT_OF_HOST_MEMORY")
    with faults.inject(fault), pytest.raises(OutOfDeviceMemory):
        runner.mesh.recorded_step(StepKind.of_run(4, 1))
    kinds = ("VkDescriptorPool", "VkCommandBuffer", "kp.Sequence")
    after = [device.counts for device in runner.mesh.devices]
    assert [[c[kind] for kind in kinds] for c in after] == [[c[kind] for kind in kinds] for c in before]
    runner.close()


FAULTS = [
    ("vkQueueSubmit", 3, "VK_ERROR_DEVICE_LOST", DeviceLost, []),
    ("vkQueueSubmit", 3, "VK_ERROR_OUT_OF_DEVICE_MEMORY", OutOfDeviceMemory, []),
    ("vkGetSemaphoreCounterValue", 12, "VK_ERROR_DEVICE_LOST", DeviceLost, [pytest.mark.native]),
    ("vkAllocateMemory", 2, "VK_ERROR_OUT_OF_DEVICE_MEMORY", OutOfDeviceMemory, []),
    ("vkCreateBuffer", 1, "VK_ERROR_OUT_OF_HOST_MEMORY", OutOfDeviceMemory, []),
    ("vkCreateComputePipelines", 2, "VK_ERROR_DEVICE_LOST", DeviceLost, []),
    ("vkCreatePipelineCache", 1, "VK_ERROR_OUT_OF_HOST_MEMORY", OutOfDeviceMemory, [pytest.mark.native]),
]


CASES = [pytest.param(*row, id="-".join(map(str, row[:3])), marks=marks) for *row, marks in FAULTS]


@pytest.mark.parametrize(
    ("call", "nth", "result", "error", "devices"),
    [
        *some(product(CASES, [EVERY_IF_ALL]), 2),
        *product(CASES, [wide(DRIVERS), wide(THREE)]),
    ],
)
def test_injected_fault(
    models: Path, call: str, nth: int, result: str, error: type[VkbackendError], devices: list[str]
) -> None:
    name = "Vulkan1" if "1" in devices else "Vulkan0.1"
    runner = None
    with faults.inject(faults.Fault(name, call, nth, result)), pytest.raises(error, match=name):
        runner = load(models, devices)
        for pos in range(10):
            step(runner, pos)
    if runner is not None:
        runner.close()
        assert all(not d.counts for d in runner.mesh.devices), [d.counts for d in runner.mesh.devices]
    works_again(models, devices)


@pytest.mark.native
def test_a_fault_from_the_environment_hangs_a_device(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VKBACKEND_FAULT", "Vulkan0.1:vkSignalSemaphore:1:hang")
    planned = faults._from_environment()
    assert [f.result for f in planned] == ["hang"]
    with faults.inject(planned[0]):
        runner = load(models, ["0", "0"])
        with hurry():
            with pytest.raises(Timeout, match=r"Vulkan0\.1"):
                step(runner)
            with pytest.raises(DeviceLost, match="load it again"):
                step(runner, 1)
            runner.close()
    stuck = runner.mesh.devices[1]
    assert stuck.abandoned and not runner.mesh.devices[0].counts
    works_again(models, ["0", "0"])
    stuck.queue.allow(stuck.queue.submitted)
    assert stuck.queue.wait(stuck.queue.submitted, 10)


@pytest.mark.parametrize("devices", [EVERY_IF_ALL])
@pytest.mark.parametrize(
    "fault",
    [
        "vkAllocateMemory:4:VK_ERROR_OUT_OF_DEVICE_MEMORY",
        pytest.param("vkQueueSubmit:3:VK_ERROR_DEVICE_LOST", marks=pytest.mark.wide),
    ],
)
def test_fault_on_the_command_line(devices: list[str], fault: str) -> None:
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "vkbackend.tools.cli",
            "generate",
            "-p",
            "Once",
            "-n",
            "8",
            "-dev",
            ",".join(devices),
        ],
        env=os.environ | {"VKBACKEND_FAULT": f"Vulkan0.1:{fault}"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
    )
    assert result.returncode == 2, result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: Vulkan0.1") and "Traceback" not in result.stderr
