from __future__ import annotations

from pathlib import Path

import pytest
from device_sets import device_params, some

from vkbackend import cache_folder, ops
from vkbackend.buffer import Home
from vkbackend.ops import measured
from vkbackend.ops.matrix import ROW_CLASSES
from vkbackend.tools import cli
from vkbackend.tools.measure import matrix_times

CHOOSES_DEVICES = True  # see conftest.py


@pytest.mark.parametrize("device", some(device_params(), 9), indirect=True, scope="session")
@pytest.mark.parametrize("off", ["buffer_address", "subgroup_shuffle", "subgroup_arithmetic", "int_dot"])
def test_disabled_features_are_not_in_the_limits(
    device: object, off: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vkbackend.vulkan.device import VulkanDevice

    assert isinstance(device, VulkanDevice)
    if off not in device.limits.features:
        pytest.skip(f"{device.name} lacks {off} anyway")
    monkeypatch.setenv("VKBACKEND_DISABLE", off)
    other = VulkanDevice(device.info)
    try:
        assert off not in other.limits.features and other.limits.features < device.limits.features
        address = other.buffer(256, Home.SCRATCH, "x").address
        assert (address == 0) == (off == "buffer_address")
    finally:
        other.close()


@pytest.mark.parametrize("device", some(device_params(), 9), indirect=True, scope="session")
def test_devices_read_the_choices_of_tune(
    device: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vkbackend.vulkan.device import VulkanDevice

    assert isinstance(device, VulkanDevice)
    info, spec = device.info, str(device.info.index)
    monkeypatch.setenv("VKBACKEND_CACHE", str(tmp_path))
    monkeypatch.setattr(matrix_times, "TYPES", ("f32",))
    monkeypatch.setattr(matrix_times, "SHAPES", ((8, 32),))
    assert cli.main(["tune", "-dev", spec]) == 0
    shown = capsys.readouterr().out
    table = measured.load(info)
    assert set(table) == set(ROW_CLASSES) and all(op in shown for choices in table.values() for op in choices)
    other = VulkanDevice(info)
    try:
        assert other.limits.choices == tuple(table.items())
        for name, rows in (("one", 1), ("few", 5), ("some", 9), ("more", 17), ("many", 33)):
            assert ops.mat_op(other.limits, rows, "f32") == table[name][0]
    finally:
        other.close()
    name = measured.entry_name(info)
    for stored in ([], 3, {"format": 3, "ops": [1]}, {"format": 2, "ops": {"one": "mat_lane"}}):
        cache_folder.write_json(name, stored)
        assert measured.load(info) == {}
    ops_of = {"one": ["mat_mul"], "many": ["add", "mat_lane"], "x": ["add"]}
    cache_folder.write_json(name, {"format": 3, "ops": ops_of})
    assert measured.load(info) == {"many": ("mat_lane",)}
    (tmp_path / name).write_text("[" * 100_000, encoding="utf-8")
    assert measured.load(info) == {}
    assert cli.main(["tune", "-dev", spec, "--forget"]) == 0 and not (tmp_path / name).exists()
    monkeypatch.setenv("VKBACKEND_CACHE", "off")
    capsys.readouterr()
    assert cli.main(["tune", "-dev", spec]) == 2
    assert "no cache folder to keep the measured table in" in capsys.readouterr().err
