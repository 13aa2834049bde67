"""Forms of products on matrix units that lavapipe does not choose. test_on_matrix_units.py runs these tests
on a lavapipe with matrix units.

Lavapipe has only matrices of 8 x 8 x 8, and crashes on matrices in subgroups of other sizes than 8
(LP_NATIVE_VECTOR_WIDTH). So kernels for matrices of 16 x 16 x 16 and subgroups of 32 or 64, as on AMD and
NVIDIA, are only compiled here (tests/tools/test_spills.py). An H100 has run them for subgroups of 32
(docs/measurements/h100.md).
"""

from __future__ import annotations

import numpy as np
import pytest
from device_sets import device_params

from vkbackend.ops import units
from vkbackend.runtime import Device
from vkbackend.tools.op_cases.check import run_case, shape_of
from vkbackend.tools.op_cases.half import MatMulCoop
from vkbackend.tools.op_cases.matrix import MatVec
from vkbackend.tools.op_cases.quantized import MatMulDotCoop

CHOOSES_DEVICES = True
CASES = [
    MatMulCoop("f16", 67, 35, 65, pad=3, bias=True, span=1e6),
    MatMulCoop("q8_0", 129, 96, 96, nan=True),
    MatMulCoop("f32", 64, 64, 97, bias=True),
    MatMulCoop("q4_k", 130, 256, 70),
    MatMulDotCoop("q4_0", 67, 32, 65, pad=3, bias=True),
    MatMulDotCoop("q8_0", 129, 96, 96, nan=True),
    MatMulDotCoop("q4_k", 64, 256, 193),
]


@pytest.mark.wide
@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("device", device_params(), indirect=True, scope="session")
def test_tiles_of_64_by_96(case: MatVec, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subgroup multiplies 2 x 3 matrices, as for 65 to 96 rows on AMD and NVIDIA."""
    if not device.limits.features.issuperset(case.needs):
        pytest.skip(f"{device.name} lacks {', '.join(case.needs)}")
    monkeypatch.setattr(units, "_NARROW", 4)  # subgroups of 8 count as wide
    across, down = units.subgroups(device.limits, 64, 96)
    monkeypatch.setattr(units, "coop_tile", lambda *_: (64, 96, across, down))
    seed = int(np.random.default_rng().integers(1 << 32))
    [(consts, _)] = [
        (dict(consts), groups)
        for name, (consts, groups) in zip(*_dispatches(case, device, seed), strict=True)
        if name.startswith(case.op.name)
    ]
    assert (consts["FM"], consts["FN"]) == (2, 3) and consts["N"] * consts["FN"] * consts["SN"] == 96
    assert run_case(case, device, device.limits, seed) <= case.tolerance, seed


def _dispatches(case: MatVec, device: Device, seed: int) -> tuple[tuple, tuple]:
    shape = shape_of(case, device.limits, seed)
    return shape.names, shape.how
