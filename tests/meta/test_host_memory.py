"""Each kind of pinned host memory is measured once, and weights use the fastest kind."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from device_sets import device_params, some
from material import DATA
from prefills import prefill
from runners import load_runner

from vkbackend.buffer import IMPORTED_KIND, Buffer, Home, View
from vkbackend.errors import OutOfDeviceMemory
from vkbackend.meta import host_memory
from vkbackend.meta.host_memory import measure_host_memory, measure_pair, shared_bus
from vkbackend.meta.known_speed import Speed, host_key, key_of, known_host_kind, known_speed, remember
from vkbackend.runtime import Device
from vkbackend.tools.measure.simulated import SimulatedDevice
from vkbackend.twins.device import NumpyDevice

CHOOSES_DEVICES = True  # see conftest.py

MODEL = DATA / "stories-narrow-F16.gguf"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.native
@pytest.mark.parametrize("device", some(device_params(), 9), indirect=True, scope="session")
def test_every_kind_is_measured_once(device: Device, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(device.counts), dict(device.nbytes)
    remember(f"speed {key_of(device)}", [8e11, 1.0])
    rates = measure_host_memory(device)
    assert tuple(rates) == device.host_kinds and device.host_kinds
    for of in rates.values():
        assert all(1e6 < rate < 1e13 for rate in (of.read, of.copy, of.read_with_copy, of.copy_with_read))
    pair = measure_pair(device, device)
    assert all(1e6 < rate < 1e13 for rate in pair)
    assert (dict(device.counts), dict(device.nbytes)) == before
    assert known_speed(device) == Speed(8e11, max(of.read for of in rates.values()))
    monkeypatch.setattr(host_memory, "_rates", lambda twin: pytest.fail("measured again"))
    monkeypatch.setattr(host_memory, "_together", lambda *_: pytest.fail("measured again"))
    assert measure_host_memory(device) == rates and measure_pair(device, device) == pair


@pytest.mark.no_vulkan
def test_the_fastest_kind_is_chosen(cache: Path) -> None:
    device = SimulatedDevice(0, 1 << 30)
    device.host_kinds = "write-combined", "cached", IMPORTED_KIND

    def chosen(*rates: float) -> str:
        for kind, rate in zip(device.host_kinds, rates, strict=True):
            remember(host_key(device, kind), [rate] * 4)
        return known_host_kind(device)

    assert known_host_kind(device) == ""
    remember(host_key(device, "cached"), [1e9] * 4)
    assert known_host_kind(device) == "", "the default was not measured"
    assert chosen(10e9, 1e9, 5e9) == ""
    assert chosen(10e9, 10.1e9, 5e9) == "", "the difference is noise"
    assert chosen(10e9, 26e9, 5e9) == "cached"
    assert chosen(10e9, 26e9, 28e9) == IMPORTED_KIND


@pytest.mark.no_vulkan
def test_devices_on_one_bus_share_its_rate(cache: Path) -> None:
    devices = [SimulatedDevice(i, 1 << 30) for i in range(3)]
    for first, second, *rates in ((0, 1, 6e9, 7e9), (0, 2, 12e9, 12e9), (1, 2, 12e9, 12e9)):
        remember(f"host pair {key_of(devices[first])}, {key_of(devices[second])}", rates)
    alone = [Speed(8e11, 12e9)] * 3
    every = [True] * 3
    assert shared_bus(devices, alone, every) == [Speed(8e11, 6e9), Speed(8e11, 7e9), Speed(8e11, 12e9)]
    assert shared_bus(devices, alone, [True, False, True]) == alone
    same = [NumpyDevice("a"), NumpyDevice("b")]
    assert shared_bus(same, alone[:2], every[:2]) == alone[:2], "devices of one processor are not measured"


@pytest.mark.native
@pytest.mark.parametrize("placed", ["imported", "refused"])
def test_weights_in_imported_pages(placed: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured choice changes neither logits nor the counted bytes. If the driver refuses to import
    pages, the driver's own memory is used."""
    options = {"devices": ["0"], "override_tensor": ["ffn=CPU"], "use_mmap": False}
    tokens = [1, *range(5, 24)]
    with closing(load_runner(MODEL, **options)) as runner:
        want, nbytes = prefill(runner, tokens), dict(runner.mesh.devices[0].nbytes)
        default = runner.mesh.devices[0].host_kinds[0]
        for kind in runner.mesh.devices[0].host_kinds:
            remember(host_key(runner.mesh.devices[0], kind), [2e9 if kind == IMPORTED_KIND else 1e9] * 4)
    n_imported = 0
    from vkbackend.vulkan.memory import Memory

    true = Memory.import_pages

    def importing(memory: Memory, pages: object, label: str, home: Home | None = None) -> Buffer:
        nonlocal n_imported
        if home is Home.HOST:
            n_imported += 1
            if placed == "refused":
                raise OutOfDeviceMemory("refused")
        return true(memory, pages, label, home)  # type: ignore[arg-type]

    monkeypatch.setattr(Memory, "import_pages", importing)
    with closing(load_runner(MODEL, **options)) as runner:
        assert np.array_equal(prefill(runner, tokens), want)
        assert dict(runner.mesh.devices[0].nbytes) == nbytes and default != IMPORTED_KIND
        assert runner.mesh.devices[0].host_kind == "", "later buffers are of the default kind"
    assert n_imported


@pytest.mark.native
@pytest.mark.parametrize("device", device_params(), indirect=True, scope="session")
def test_buffers_of_every_kind(device: Device) -> None:
    for kind in ("", *device.host_kinds):
        device.host_kind = kind
        before = dict(device.counts)
        buffer = device.buffer(10_000, Home.HOST, "a weight")
        view, values = View(buffer, 256, (1000,), "u32"), np.arange(1000, dtype=np.uint32)
        assert buffer.nbytes == device.nbytes[Home.HOST] == 10_240 and buffer.home is Home.HOST
        device.write(view, values)
        assert np.array_equal(device.read(view).view(np.uint32), values)
        device.free(buffer)
        assert dict(device.counts) == before and not device.nbytes[Home.HOST]
    device.host_kind = ""
