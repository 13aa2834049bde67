"""What ops choose for GPUs alone and the floor does not reach: workgroups as large as the device allows."""

from __future__ import annotations

import secrets
from dataclasses import replace

import pytest

from vkbackend.runtime import Device
from vkbackend.tools.op_cases.check import run_case, shape_of
from vkbackend.tools.op_cases.reduces import AddPartials
from vkbackend.tools.op_cases.rows import RmsNorm
from vkbackend.tools.op_cases.setup import Case

CASES = [
    RmsNorm(2050, 2),
    AddPartials(2050, 2, n_slots=3, own=1, writers=0b111, in_place=True),
]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_large_workgroups(case: Case, device: Device) -> None:
    if device.limits.max_invocations <= 128:
        pytest.skip(f"{device.name} has workgroups of {device.limits.max_invocations} at most")
    limits, seed = replace(device.limits, is_cpu=False), secrets.randbelow(1 << 31)
    ((consts, _),) = shape_of(case, limits, seed).how  # type: ignore[misc]
    assert dict(consts)["LOCAL"] == min(512, device.limits.max_invocations), consts
    run_case(case, device, limits, seed)
