"""These tests cover features of the kompute runtime alone: order, deadlines, and checks that kp omits."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import device_infos, needs_layer
from places import ROOT
from runners import load_runner

from vkbackend import shaderlib
from vkbackend.buffer import Home, View
from vkbackend.errors import DeviceLost, OutOfDeviceMemory, Timeout, UnsupportedFeature
from vkbackend.kompute.device import KomputeDevice
from vkbackend.kompute.spirv import storage_only
from vkbackend.meta import relay
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.open_device import open_device
from vkbackend.ops import Recorder
from vkbackend.recording import Recording
from vkbackend.step import Run
from vkbackend.vulkan.capabilities import compute_family
from vkbackend.vulkan.instance import position

pytestmark = [
    pytest.mark.runtimes,
    pytest.mark.skipif(
        importlib.util.find_spec("kp") is None, reason="no kp here: bash tools/setup.sh --kompute --test"
    ),
    pytest.mark.skipif(not device_infos(), reason="no Vulkan device is present"),
]

# Each copy command reads the previous copy's output and overwrites the previous copy's input. "bare" removes
# the barriers.
CHAIN = """
import sys
import numpy as np
from vkbackend.vulkan import instance
from vkbackend.buffer import Home, View
from vkbackend.ops import Recorder
from vkbackend.recording import Recording
from vkbackend.open_device import open_device
device = open_device(instance.devices()[0], runtime="kompute")
commands = device.commands
if sys.argv[1] == "bare":
    device.commands = lambda part: [command for command in commands(part) if command is not None]
a, b = (View(device.buffer(4096, Home.SCRATCH, name), 0, (1024,), "u32") for name in "ab")
want = np.arange(1024, dtype=np.uint32)
device.write(a, want)
recording = Recording("chain")
for _ in range(8):
    Recorder(recording, device.limits).copy_words(a, b)
    Recorder(recording, device.limits).copy_words(b, a)
device.run(recording)
assert np.array_equal(device.read(b).view(np.uint32), want)
device.close()
"""


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[KomputeDevice]:
    opened = open_device(request.param, runtime="kompute")
    assert isinstance(opened, KomputeDevice)
    yield opened
    opened.close()
    assert not opened.counts


@needs_layer
@pytest.mark.parametrize("order", ["bare", "word", pytest.param("submit", marks=pytest.mark.wide)])
def test_order(order: str) -> None:
    """Without barriers, synchronization validation reports execution hazards and memory hazards. If a
    submission ends at every barrier, validation reports no hazards. If a word is copied in place of a
    barrier, validation reports only memory hazards. These reports are false, because the drivers flush all
    memory at a barrier (see kompute/device.py)."""
    env = {"VKBACKEND_VALIDATION": "1", "VKBACKEND_KOMPUTE_ORDER": "word" if order == "bare" else order}
    done = subprocess.run(
        [sys.executable, "-c", CHAIN, order],
        env=os.environ | env, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    after_read = done.stderr.count("vkCmdDispatch: Hazard WRITE_AFTER_READ")
    after_write = done.stderr.count("vkCmdDispatch: Hazard READ_AFTER_WRITE")
    if order == "bare":
        assert after_read >= 14 and after_write >= 14, done.stderr
    else:
        assert after_read == 0, done.stderr
    if order == "submit":
        assert "Hazard" not in done.stderr, done.stderr


def test_too_large_buffers_are_refused(device: KomputeDevice) -> None:
    limit = device.limits.max_allocation_nbytes
    assert limit <= device.limits.max_storage_range  # kp binds complete tensors
    with pytest.raises(OutOfDeviceMemory, match="can be bound at once") as raised:
        device.buffer(limit + 256, Home.WEIGHTS, "too large")
    assert (raised.value.requested, raised.value.budget) == (limit + 256, limit)
    device.nbytes[Home.KV] += (heap := max(h.nbytes for h in device.info.heaps if h.device_local))
    with pytest.raises(OutOfDeviceMemory, match="left of the heap"):
        device.buffer(4096, Home.WEIGHTS, "one too many")
    device.nbytes[Home.KV] -= heap
    device.buffer(4096, Home.WEIGHTS, "fits")


def test_canary(device: KomputeDevice) -> None:
    """Wrong canary words, which a failed allocation would cause, are detected."""
    view = View(device.buffer(4096, Home.WEIGHTS, "weights"), 0, (1000,), "u32")
    other = View(device.buffer(4096, Home.WEIGHTS, "other"), 0, (1000,), "u32")
    for target in (view, other):
        device.write(target, np.arange(1000, dtype=np.uint32))
    device.drop_upload()
    device.write(other, np.zeros(1000, np.uint32))
    device.write(view, np.arange(1000, dtype=np.uint32))
    recording = Recording("clobber")
    Recorder(recording, device.limits).copy_words(other, view)
    device.call("once", device.commands(recording.accesses()), [], [])
    with pytest.raises(OutOfDeviceMemory, match="weights of 4096 bytes does not hold what was written"):
        device.drop_upload()


def test_submission_that_does_not_run() -> None:
    """The worker reads a copy of the word. The device never writes into this copy."""
    from vkbackend.kompute.worker import BEAT_OUT, Worker

    ours, theirs = socket.socketpair()
    info = device_infos()[0]
    with ours, theirs:
        worker = Worker(theirs)
        code = storage_only(shaderlib.spirv("copy_words", "f32"))
        worker.open(position(info), compute_family(info.physical)[0], code)
        worker.once([], [], [])
        worker._mapped[BEAT_OUT] = worker._mapped[BEAT_OUT].copy()
        with pytest.raises(RuntimeError, match="did not run to its end"):
            worker.once([], [], [])
        worker.close()


def test_an_interrupted_request_does_not_answer_the_next(
    device: KomputeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (View(device.buffer(256, Home.SCRATCH, name), 0, (64,), "u32") for name in "ab")
    recording = Recording("copy")
    Recorder(recording, device.limits).copy_words(a, b)
    executable = device.build(recording, timed=True)
    device.queue.submit(executable, 0, 1)
    assert device.queue.wait(1, 10)

    def interrupt(timeout_s: float) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(device, "answers", interrupt)
        device.call("module", 99, b"")
    assert [command.op for command, _ in executable.durations()] == ["copy_words"]
    device.queue.submit(executable, 0, 1)
    assert device.queue.wait(2, 10) and device.queue.completed() == 2
    executable.close()


def test_failed_allocation_does_not_confuse_later_requests(
    device: KomputeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, before = device.call, (dict(device.nbytes), dict(device.counts))

    def impossible(name: str, *args: Any, **options: Any) -> Any:
        return call(name, args[0], -1, *args[2:], **options) if name == "tensor" else call(name, *args)

    for home in (Home.STAGING, Home.WEIGHTS):
        with monkeypatch.context() as patch, pytest.raises(OutOfDeviceMemory, match="negative dimensions"):
            patch.setattr(device, "call", impossible)
            device.buffer(4096, home, "impossible")
    assert (dict(device.nbytes), dict(device.counts)) == before
    view = View(device.buffer(4096, Home.STAGING, "after it"), 0, (1024,), "u32")
    words = np.arange(1024, dtype=np.uint32)
    device.write(view, words)
    assert np.array_equal(device.read(view).view(np.uint32), words)


def test_too_many_storage_buffers_are_refused(device: KomputeDevice) -> None:
    a, b = (View(device.buffer(256, Home.SCRATCH, name), 0, (64,), "u32") for name in "ab")
    recording = Recording("copy")
    Recorder(recording, device.limits).copy_words(a, b)
    device.info = replace(device.info, limits=device.info.limits | {"max_storage_buffers": 1})
    with pytest.raises(UnsupportedFeature, match=r"copy_words needs 2 storage buffers.* may bind 1 "):
        device.build(recording)


def test_stopped_worker_does_not_block_other_devices() -> None:
    """The test stops each of two workers in turn. A submission to a stopped worker does not block, and the
    other worker finishes."""
    devices = [open_device(device_infos()[0], f"Vulkan0.{d}", runtime="kompute") for d in range(2)]
    executables = []
    try:
        for device in devices:
            views = [View(device.buffer(256, Home.SCRATCH, name), 0, (64,), "u32") for name in "ab"]
            recording = Recording("copy")
            Recorder(recording, device.limits).copy_words(*views)
            executables.append(device.build(recording))
        for held, free in ((0, 1), (1, 0)):
            pid = devices[held].pid  # type: ignore[attr-defined]
            os.kill(pid, signal.SIGSTOP)
            try:
                devices[held].queue.submit(executables[held], 0, 1)
                before = devices[held].queue.completed()
                for _ in range(3):
                    devices[free].queue.submit(executables[free], 0, 1)
                    assert devices[free].queue.wait(devices[free].queue.submitted, 30)
                assert devices[held].queue.completed() == before < devices[held].queue.submitted
            finally:
                os.kill(pid, signal.SIGCONT)
            assert devices[held].queue.wait(devices[held].queue.submitted, 30)
    finally:
        for device in devices:
            device.close()


def step(runner: Runner, pos: int = 0) -> np.ndarray:
    return runner.step([5], [Run(0, 0, 1, pos)], [0])


def load(models: Path) -> Runner:
    path = models / "stories-narrow-F32.gguf"
    return load_runner(path, devices=["0", "0"], n_ctx=64, n_ubatch=1, runtime="kompute")


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        pytest.param(signal.SIGSTOP, Timeout, id="stops", marks=pytest.mark.wide),
        pytest.param(signal.SIGKILL, DeviceLost, id="dies"),
    ],
)
def test_worker_that(
    models: Path, sent: signal.Signals, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "DRAIN_S", 1.0)
    runner = load(models)
    want = step(runner).copy()
    monkeypatch.setenv("VKBACKEND_TIMEOUT", "1" if error is Timeout else "60")
    os.kill(runner.mesh.devices[1].pid, sent)
    with pytest.raises(error, match=r"Vulkan0\.1"):
        step(runner, 1)
    with pytest.raises(DeviceLost, match="load it again"):
        step(runner, 2)
    runner.close()
    assert all(not d.counts for d in runner.mesh.devices)
    monkeypatch.setenv("VKBACKEND_TIMEOUT", "60")
    again = load(models)
    assert np.array_equal(step(again), want)
    pids = [device.pid for device in again.mesh.devices]
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    again.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
