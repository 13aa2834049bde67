"""Pipelines compile in parallel. The tests cover failures and the cache file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from device_sets import device_infos
from runners import load_runner

from vkbackend import cache_folder, env, faults, shaderlib
from vkbackend.buffer import Buffer, Home, View
from vkbackend.errors import OutOfDeviceMemory, UnsupportedFeature
from vkbackend.limits import Limits
from vkbackend.meta.step_kind import StepKind
from vkbackend.ops import Recorder
from vkbackend.ops.elementwise import ACTS
from vkbackend.recording import Dispatch, Recording
from vkbackend.tools.measure.compile_times import CACHED
from vkbackend.tools.studies import bench_compile

pytestmark = pytest.mark.native


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for dispatch in some_dispatches():
        shaderlib.spirv(dispatch.op, dispatch.variant)
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))
    monkeypatch.setenv(env.COMPILE_THREADS, "2")
    return tmp_path


@pytest.fixture
def programs(device: Any, caches: Path) -> Iterator[Any]:
    from vkbackend.vulkan.program import Programs

    before = dict(device.counts)
    compiled = Programs(device, device.memory, device.transfers)
    yield compiled
    compiled.close()
    assert dict(device.counts) == before


def some_dispatches() -> list[Dispatch]:
    rec, (x, y) = Recording("some"), (View(Buffer(256, Home.SCRATCH, name), 0, (64,)) for name in "xy")
    for act in ACTS[:5]:
        Recorder(rec, Limits()).glu(x, x, y, act=act)
    Recorder(rec, Limits()).scale(x, y, c=2.0)
    return [c for c in rec.accesses() if isinstance(c, Dispatch)]


class Driver:
    def __init__(self, lib: Any, create: Any) -> None:
        self._lib, self.vkCreateComputePipelines = lib, create

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)


def test_pipelines_compile_in_parallel(programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads meet at the barrier, so sequential compilation would block forever."""
    from vkbackend.vulkan import program

    real, meeting = program.lib.vkCreateComputePipelines, threading.Barrier(2)

    def create(*args: Any) -> int:
        meeting.wait(20)
        return int(real(*args))

    monkeypatch.setattr(program, "lib", Driver(program.lib, create))
    dispatches = some_dispatches()
    pipelines = programs.pipelines(dispatches)
    assert len(pipelines) == len(dispatches) == 6 and len({p for p, _ in pipelines}) == 6
    monkeypatch.undo()
    assert [p for p, _ in programs.pipelines(dispatches[::-1])] == [p for p, _ in pipelines[::-1]], (
        "made again"
    )


@pytest.mark.parametrize("nth", [1, 3, 6])
def test_refused_pipeline(programs: Any, device: Any, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from vkbackend.vulkan import program

    real, began = program.lib.vkCreateComputePipelines, []

    def create(*args: Any) -> int:
        began.append(1)
        return int(program.C.VK_ERROR_OUT_OF_HOST_MEMORY if len(began) == nth else real(*args))

    monkeypatch.setattr(program, "lib", Driver(program.lib, create))
    dispatches = some_dispatches()
    with pytest.raises(OutOfDeviceMemory, match=f"{device.name}.* vkCreateComputePipelines of (glu|scale)"):
        programs.pipelines(dispatches)
    assert len(programs._pipelines) == len(began) - 1 < len(dispatches)
    monkeypatch.undo()
    assert len(programs.pipelines(dispatches)) == len(dispatches)


@pytest.mark.parametrize("call", ["vkCreateShaderModule", "vkCreateComputePipelines"])
def test_injected_fault_in_one_pipeline(programs: Any, device: Any, call: str) -> None:
    with faults.inject(faults.Fault(device.name, call, 2, "VK_ERROR_OUT_OF_HOST_MEMORY")):
        with pytest.raises(OutOfDeviceMemory, match=call):
            programs.pipelines(some_dispatches())
    assert len(programs._pipelines) == 1
    programs.pipelines(some_dispatches())


def test_missing_module(programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shaderlib.spirv

    def spirv(op: str, variant: str) -> bytes:
        if op == "glu":
            raise UnsupportedFeature("no compiled form of glu")
        return real(op, variant)

    monkeypatch.setattr(shaderlib, "spirv", spirv)
    with pytest.raises(UnsupportedFeature, match="no compiled form of glu"):
        programs.pipelines(some_dispatches())
    monkeypatch.undo()
    assert len(programs.pipelines(some_dispatches())) == 6


def test_an_interrupt(programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vkbackend.vulkan import program

    def interrupted(futures: Any) -> Iterator[Any]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(program, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        programs.pipelines(some_dispatches())


def test_cache_is_saved_after_long_compilation(
    programs: Any, device: Any, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vkbackend.vulkan import pipeline_cache, program

    path = caches / pipeline_cache.entry_name(device)
    programs.pipelines(some_dispatches()[:1])
    assert not path.exists()
    if not programs._cache.data():
        pytest.skip("the driver keeps nothing, or nothing whole")
    monkeypatch.setattr(program, "SAVE_AFTER_S", 0.0)
    programs.pipelines(some_dispatches())
    again = pipeline_cache.PipelineCache(device)
    assert again._stored and path.read_bytes().endswith(again._stored)
    again.save()
    path.unlink(missing_ok=True)
    again.save()
    again.close()
    assert not path.exists()


def test_data_of_another_driver_in_a_valid_file(device: Any, caches: Path) -> None:
    """The file's checksum and device are valid, but another driver made the data."""
    from vkbackend.vulkan import pipeline_cache

    name = pipeline_cache.entry_name(device)
    for body in (b"\x20\0\0\0\x01\0\0\0", bytes(32), b"\xff" * 5000):
        cache_folder.write(name, body)
        cache = pipeline_cache.PipelineCache(device)
        assert cache._stored == b""
        whole = cache.data()
        cache.save()
        cache.close()
        assert cache_folder.read(name) == (whole or body)


def test_compiled_is_called_for_every_pipeline(
    programs: Any, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(device, "compiled", lambda: calls.append(1))
    programs.pipelines(some_dispatches())
    programs.pipelines(some_dispatches())
    assert len(calls) == 6


def test_requested_pipelines_are_compiled_before_begun_pipelines(
    programs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later pipeline is requested while the only compile thread compiles the first pipeline."""
    from vkbackend.vulkan import program

    monkeypatch.setenv(env.COMPILE_THREADS, "1")
    dispatches, order, held, free = some_dispatches(), list[Any](), threading.Event(), threading.Event()
    real = program.Programs._compile

    def compile_(self: Any, *key: Any) -> Any:
        order.append(key[:3])
        held.set()
        free.wait(20)
        return real(self, *key)

    monkeypatch.setattr(program.Programs, "_compile", compile_)
    programs.begin(dispatches)
    assert held.wait(20)
    threading.Timer(0.1, free.set).start()
    programs.pipelines(dispatches[-2:-1])
    keys = [(d.op, d.variant, d.consts) for d in dispatches]
    assert order[:2] == [keys[0], keys[-2]]
    programs.pipelines(dispatches)
    assert sorted(order) == sorted(keys), "each is made once"
    assert not programs._begun


def test_error_of_a_begun_pipeline_is_raised_on_request(programs: Any, device: Any) -> None:
    with faults.inject(
        faults.Fault(device.name, "vkCreateComputePipelines", 3, "VK_ERROR_OUT_OF_HOST_MEMORY")
    ):
        programs.begin(some_dispatches())
        with pytest.raises(OutOfDeviceMemory, match="vkCreateComputePipelines"):
            programs.pipelines(some_dispatches())
    assert len(programs.pipelines(some_dispatches())) == 6


def test_close_while_compiling(programs: Any) -> None:
    programs.begin(some_dispatches())


@pytest.mark.parametrize("name", ["stories-narrow-F32.gguf"])
def test_loading_begins_all_programs_of_a_decode_step(models: Path, name: str) -> None:
    runner = load_runner(models / name, devices=["0", "0"], n_ctx=64)
    calls: list[int] = []
    runner.tell_of_compiling(lambda: calls.append(1))
    devices = runner.mesh.devices
    begun = [set(device.programs._begun) | set(device.programs._pipelines) for device in devices]
    runner.mesh.recorded_step(StepKind.of_run(1, 1, runner.max_top_k))
    for device, keys in zip(devices, begun, strict=True):
        assert len(keys) > 5 and set(device.programs._pipelines) == keys and not device.programs._begun
    assert len(calls) == sum(len(keys) for keys in begun)
    runner.close()


@pytest.mark.parametrize("call", ["vkCreateDescriptorSetLayout", "vkCreatePipelineLayout"])
@pytest.mark.parametrize(("nth", "codebook"), [(1, None), (1, "iq2_xxs"), (2, "iq2_xxs")])
def test_failed_layout_leaks_nothing(
    programs: Any, device: Any, call: str, nth: int, codebook: str | None
) -> None:
    with faults.inject(faults.Fault(device.name, call, nth, "VK_ERROR_OUT_OF_HOST_MEMORY")):
        with pytest.raises(OutOfDeviceMemory, match=call):
            programs.layouts.get(3, 1, codebook)
    assert len(programs.layouts._layouts) == nth - 1
    assert programs.layouts.get(3, 1, codebook).n_args == 3


@pytest.mark.parametrize(
    "call", ["vkCreateBuffer", "vkAllocateMemory", "vkCreateDescriptorPool", "vkAllocateDescriptorSets"]
)
def test_failed_codebook_leaks_nothing(programs: Any, device: Any, call: str) -> None:
    programs.layouts.get(1, False)
    before = +device.counts, +device.nbytes
    with faults.inject(faults.Fault(device.name, call, 1, "VK_ERROR_OUT_OF_HOST_MEMORY")):
        with pytest.raises(OutOfDeviceMemory, match=call):
            programs.codebooks.descriptor_set("iq2_xxs")
    assert (+device.counts, +device.nbytes) == before
    programs.codebooks.descriptor_set("iq2_xxs")


@pytest.mark.parametrize("nth", [1, 2])
def test_failed_queue_leaks_nothing(device: Any, nth: int) -> None:
    from vkbackend.vulkan.queues import TimelineQueue

    if not device.features.get("timeline"):
        pytest.skip(f"{device.name} has no timeline semaphores")
    before = dict(device.counts)
    with faults.inject(faults.Fault(device.name, "vkCreateSemaphore", nth, "VK_ERROR_OUT_OF_HOST_MEMORY")):
        with pytest.raises(OutOfDeviceMemory, match="vkCreateSemaphore"):
            TimelineQueue(device)
    assert dict(device.counts) == before
    TimelineQueue(device).close()
    assert dict(device.counts) == before


def test_bench_compile(
    models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not device_infos():
        pytest.skip("no Vulkan device is present")
    model = str(models / "stories-narrow-F32.gguf")
    asked = ["bench_compile", "-m", model, "-dev", "0", "-r", "1", "-p", "2", "-t", "2"]
    monkeypatch.setattr("sys.argv", asked)
    assert bench_compile.main() == 0
    title, *lines = capsys.readouterr().out.strip().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines[3:]]
    rows = {way: [float(x.strip("()")) for x in values] for way, *values in cells}
    assert int(title.split()[0]) > 5 and set(rows) == {"1", "2", CACHED}
    assert all(least > 0 and ratio > 0 for least, _, ratio in rows.values()), rows


def test_bench_compile_refuses_numpy(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(models / "stories-narrow-F32.gguf")
    monkeypatch.setattr("sys.argv", ["bench_compile", "-m", model, "-dev", "numpy", "-r", "1"])
    with pytest.raises(SystemExit, match=r"^error: .*numpy compiles no pipelines"):
        bench_compile.main()
