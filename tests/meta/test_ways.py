"""Test which way to exchange sums is chosen for a size, what each way requires, and sums in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import MULTI, wide
from summing import Sum, expected

from vkbackend.errors import DeviceLost, OutOfDeviceMemory, UnsupportedFeature
from vkbackend.faults import Fault, inject
from vkbackend.meta import known_ways, ways
from vkbackend.meta.graph import row_pieces
from vkbackend.meta.known_ways import Choice, known_choice, remember_choice
from vkbackend.meta.reduce import Reduce
from vkbackend.meta.ways import PROVIDERS, BySize, make_provider, planned_ways, slots_nbytes
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.twins.device import NumpyDevice

TWO = [p for p in MULTI if p.id in ("0,0", "0,1")]
CHOICE = Choice(((4096, "visible"), (65_536, "pages"), (1 << 40, "pieces")), "flag", None)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))
    return tmp_path


def numpy_devices(n: int) -> list[NumpyDevice]:
    return [NumpyDevice(f"numpy.{d}") for d in range(n)]


def test_a_choice_is_kept_for_these_devices_in_this_order(cache: Path) -> None:
    devices = numpy_devices(3)
    remember_choice(devices, CHOICE)
    assert known_choice(devices) == CHOICE and known_choice(devices[:2]) is None
    assert [CHOICE.way(n) for n in (4, 4096, 4100, 1 << 20, 1 << 50)] == [
        *("visible", "visible", "pages", "pieces", "pieces")
    ]
    remember_choice(devices, None)
    assert known_choice(devices) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"ways": []},
        {"ways": [["4", "pages"]]},
        {"ways": [[8, "pages"], [4, "pages"]]},
        {"ways": [[4, "pages", 1]]},
        {"ways": 3},
        {"signal": "smoke"},
        {"ahead": -1},
        {"ahead": True},
    ],
)
def test_a_damaged_choice_is_ignored(cache: Path, changed: dict[str, Any]) -> None:
    devices = numpy_devices(2)
    value = {"ways": [[4096, "pages"]], "signal": "flag", "ahead": 2}
    known_ways.remember(known_ways._key(devices), value)
    assert known_choice(devices)
    known_ways.remember(known_ways._key(devices), value | changed)
    assert known_choice(devices) is None


def test_ways_by_size(cache: Path) -> None:
    devices = numpy_devices(2)
    assert [way.name for _, way in planned_ways("auto", devices, 1 << 20)] == ["pages"]
    remember_choice(devices, CHOICE)
    planned = planned_ways("auto", devices, 1 << 20)
    assert [(most, way.name) for most, way in planned] == [
        (4096, "visible"),
        (65_536, "pages"),
        (1 << 20, "pieces"),
    ]
    assert [(most, way.name) for most, way in planned_ways("auto", devices, 5000)] == [
        (4096, "visible"),
        (5000, "pages"),
    ]
    for device in devices:
        device.has_visible = False
    assert [way.name for _, way in planned_ways("auto", devices, 1 << 20)] == ["pages", "pieces"]
    remember_choice(devices, Choice(((4096, "visible"),), "flag", None))
    assert [way.name for _, way in planned_ways("auto", devices, 1 << 20)] == ["pages"]


def test_a_provider_of_each_size(cache: Path) -> None:
    devices = numpy_devices(2)
    remember_choice(devices, CHOICE)
    provider = make_provider(devices, 1 << 20)
    assert isinstance(provider, BySize)
    small, large = (Reduce(0, n // 4, (0, 1), readers=(0, 1)) for n in (4096, 1 << 20))
    piece = Reduce(0, 1024, (0, 1), readers=(0, 1), of=1 << 18)
    assert provider.of(small).name == "visible" and provider.of(large) is provider.of(piece)
    assert provider.pieces(large) == 2 and provider.pieces(small) == 1
    held = sum(sum(device.nbytes.values()) for device in devices)
    shared = provider.pages_nbytes
    # Both devices count the shared pages.
    assert held - shared == sum(padded for _, padded in slots_nbytes("auto", devices, 1 << 20))
    provider.close()
    assert not any(sum(device.nbytes.values()) for device in devices)


def test_row_pieces() -> None:
    assert row_pieces(7, 256, "f32", 2) == [(0, 4), (4, 7)]
    assert row_pieces(1, 4096, "f32", 8) == [(0, 1)]
    # 64 is the smallest number of rows of 130 elements that ends at a border of 128-element blocks.
    assert row_pieces(100, 130, "f16", 4) == [(0, 64), (64, 100)]
    assert row_pieces(512, 4096, "f16", 8) == [(at, at + 64) for at in range(0, 512, 64)]


@pytest.mark.parametrize("wire", ["f32", "f16"])
@pytest.mark.parametrize("devices", [TWO[0], wide(TWO[1])])
def test_pieces_of_a_sum_alternate_with_its_neighbours(wire: str, devices: list[str]) -> None:
    """Four sums in four pieces each have the bits of undivided sums, in three runs."""
    shape = (8, 128)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vkbackend.meta.imported_pages.PIECE_NBYTES", 1024)
        cut = Sum(open_devices(devices), [0, 1], 4, shape, reduce_provider="pieces", reduce_type=wire)
    whole = Sum(open_devices(devices), [0, 1], 4, shape, reduce_type=wire)
    values = np.random.default_rng(1).uniform(-1, 1, (4, 2, *shape)).astype(np.float32)
    for i in range(4):
        cut.put(i, values[i])
        whole.put(i, values[i])
    assert len(cut.step.reduces) == 4 * 4 and len(whole.step.reduces) == 4
    for _ in range(3):
        for got, want, shares in zip(cut.run(), whole.run(), values, strict=True):
            assert np.array_equal(got[0], want[0]) and np.array_equal(got[1], want[0])
            assert wire != "f32" or np.array_equal(got[0], expected(shares, [0, 1]))
    cut.mesh.close()
    whole.mesh.close()


@pytest.mark.parametrize("provider", [p for p in PROVIDERS if p != "host-sum"])
def test_a_way_that_devices_lack(provider: str) -> None:
    devices = numpy_devices(2)
    for device in devices:
        device.has_visible = device.imports_pages = False
    with pytest.raises(UnsupportedFeature, match=f"numpy.*{provider}.*use host-sum"):
        make_provider(devices, 4096, provider)
    assert make_provider(devices, 4096).name == "host-sum"


@pytest.mark.native
@pytest.mark.parametrize("devices", TWO[:1])
@pytest.mark.parametrize("provider", ["visible", pytest.param("pieces", marks=pytest.mark.wide)])
@pytest.mark.parametrize(
    ("call", "nth", "result", "error"),
    [
        ("vkQueueSubmit", 3, "VK_ERROR_DEVICE_LOST", DeviceLost),
        ("vkAllocateMemory", 4, "VK_ERROR_OUT_OF_DEVICE_MEMORY", OutOfDeviceMemory),
    ],
)
def test_faults(
    provider: str, call: str, nth: int, result: str, error: type[Exception], devices: list[str]
) -> None:
    opened, summed = open_devices(devices), None
    with inject(Fault(opened[1].name, call, nth, result)), pytest.raises(error, match=r"0\.1"):
        summed = Sum(opened, [0, 1], 4, reduce_provider=provider)
        summed.mesh.run(summed.step)
    if summed:
        summed.mesh.close()
    for device in opened:
        device.close()
        assert not device.counts


def test_names_are_those_of_the_table() -> None:
    assert PROVIDERS == tuple(way.name for way in ways.WAYS) and "auto" not in PROVIDERS
