"""Attention computes the same bits for a row alone and in a workgroup of several rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from device_sets import device_params, wide, with_devices

from vkbackend.limits import Limits
from vkbackend.recording import Dispatch
from vkbackend.runtime import Device
from vkbackend.tools.op_cases.attention import AttnDecode, AttnDecodeCoop
from vkbackend.tools.op_cases.chosen import AttnBlocksCoop
from vkbackend.tools.op_cases.setup import Placed

CHOOSES_DEVICES = True
# Runs that cross a border between blocks at different rows. Some have incomplete tiles.
RUNS = ((2, 27, 8), (0, 0, 3), (3, 94, 1), (1, 60, 6))
CASES = [AttnDecode(RUNS, 4, 2, 32, 32, 3, "f16", "q8_0", window=40)]
MORE = [
    AttnDecode(RUNS, 2, 2, 64, 64, 3),
    AttnDecode(RUNS, 4, 2, 128, 64, 3, "f16", "q8_0", window=40),
    AttnDecode(RUNS, 3, 1, 80, 40, None, "f32", "bf16", sinks=True, softcap=4.0),
    AttnDecode(RUNS, 5, 2, 32, 32, 2, "q4_0", "f16", group=4, q_first=2, chunk=63),
    AttnDecode(RUNS, 4, 4, 128, 128, 2, "q8_0", "q8_0"),
]

ON_UNITS = [
    AttnDecodeCoop(RUNS, 4, 1, 64, 64, 3),
    AttnDecodeCoop(RUNS, 8, 2, 128, 64, None, "f16", "q8_0", window=40, sinks=True),
    AttnDecodeCoop(RUNS, 5, 2, 32, 32, 2, "q4_0", "f32", group=4, q_first=2, chunk=63),
]
# By default, only the driver that compiles quickly runs.
FEW = with_devices([], CASES)
PARAMS = [*FEW, *map(wide, with_devices(MORE, []))]


def result(case: AttnDecode, device: Device, limits: Limits) -> tuple[np.ndarray, int]:
    placed = Placed(device, case.setup(np.random.default_rng(48)))
    try:
        recording = placed.record(limits)
        device.run(recording)
        rows = [dict(c.consts)["ROWS"] for c in recording.accesses() if isinstance(c, Dispatch)]
        return device.read(placed.views["y"]).view(np.uint32).copy(), rows[0]
    finally:
        placed.close()


@pytest.mark.parametrize("is_cpu", [pytest.param(True, marks=pytest.mark.wide), False])
@pytest.mark.parametrize(("case", "device"), PARAMS, indirect=["device"], scope="session")
def test_rows_together_have_the_bits_of_rows_alone(case: AttnDecode, device: Device, is_cpu: bool) -> None:
    limits = replace(device.limits, is_cpu=is_cpu)
    want, rows = result(case, device, limits)
    assert rows == 1
    for most in (2, 5, 8):
        got, rows = result(replace(case, run_rows=most), device, limits)
        assert rows == min(most, 8 // (case.group or case.n_heads // case.n_kv))
        np.testing.assert_array_equal(got, want)


@pytest.mark.wide
@pytest.mark.parametrize("case", ON_UNITS, ids=repr)
@pytest.mark.parametrize("device", device_params(), indirect=True, scope="session")
def test_rows_together_on_matrix_units(case: AttnDecodeCoop, device: Device) -> None:
    """test_on_matrix_units.py runs this test on a lavapipe with matrix units."""
    if not device.limits.features.issuperset(case.needs):
        pytest.skip(f"{device.name} has no matrix units")
    want, rows = result(case, device, device.limits)
    assert rows == 1
    joint = set()
    for most in (2, 5, 8):
        got, rows = result(replace(case, run_rows=most), device, device.limits)
        joint.add(rows)
        np.testing.assert_array_equal(got, want)
    assert joint == {2, 4, 8}


@pytest.mark.wide
@pytest.mark.parametrize("device", device_params(), indirect=True, scope="session")
def test_a_row_does_not_depend_on_lists_of_its_tile(device: Device) -> None:
    """Eight rows share a tile. The lists of odd rows change, and even rows keep their bits."""
    case = AttnBlocksCoop(((0, 290, 16),), 8, 2, 64, 32, 4, n_lists=2, block=32, joint=320, together=True)
    if not device.limits.features.issuperset(case.needs):
        pytest.skip(f"{device.name} has no matrix units")
    results = []
    for others in (None, (0, 1, 2), (3, 5, 6)):
        setup = case.setup(np.random.default_rng(48))
        lists = setup.tensors["chosen"].raw
        assert lists is not None
        if others:
            lists.reshape(-1, 2, 4)[1:16:2, :, :3] = others  # before the row's own block
        placed = Placed(device, setup)
        try:
            recording = placed.record(device.limits)
            device.run(recording)
            (rows,) = [dict(c.consts)["ROWS"] for c in recording.accesses() if isinstance(c, Dispatch)]
            assert rows == 8
            results.append(device.read(placed.views["y"]).view(np.uint32).reshape(17, -1)[:16].copy())
        finally:
            placed.close()
    for changed in results[1:]:
        np.testing.assert_array_equal(changed[::2], results[0][::2])
        assert (changed[1::2] != results[0][1::2]).any(axis=1).all()
