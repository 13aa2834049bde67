"""Every op case runs on every Vulkan device and must equal the numpy twins.

Cases run with the device's constants, and with the constants of the smallest GPU and folded grids. Cases of
every weight type run only once, because compiling them takes long. This command runs one case: pytest
tests/vkbackend/ops/test_ops.py --case "MatVec.*q4_0". VKBACKEND_TEST_SEED=N pytest repeats a failure with its
seed.
"""

from __future__ import annotations

import os
import re
import secrets

import pytest

from vkbackend.runtime import Device
from vkbackend.tools.op_cases.cases import CASES, FORMAT_CASES, WIDE_CASES
from vkbackend.tools.op_cases.check import Mismatch, Shape, limits_for, run_case, shape_of
from vkbackend.tools.op_cases.setup import Case


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    pattern = re.compile(metafunc.config.getoption("--case") or "")
    # every runtime runs the first case of each op, and the first case with a codebook
    kinds: set[object] = set()
    params = []
    for case in (*CASES, *WIDE_CASES) if metafunc.config.getoption("--all") else CASES:
        marks = []
        kind = type(case), any(str(value)[:3] in ("iq1", "iq2", "iq3") for value in vars(case).values())
        if kind not in kinds:
            kinds.add(kind)
            marks.append(pytest.mark.runtimes)
        if pattern.search(repr(case)):
            params.append(pytest.param(case, id=repr(case), marks=marks))
    if not params:
        raise pytest.UsageError(f"no op case matches --case {pattern.pattern} (--all adds the wide sweep)")
    metafunc.parametrize("case", params)


def test_op(case: Case, device: Device) -> None:
    seed = int(os.environ.get("VKBACKEND_TEST_SEED") or secrets.randbelow(1 << 31))
    done: list[Shape] = []
    if not (every := limits_for(case, device, once=case in FORMAT_CASES)):
        pytest.skip(f"{device.name} lacks {', '.join(sorted(set(case.needs) - device.limits.features))}")
    for limits in every:
        shape = shape_of(case, limits, seed)
        if shape not in done:
            done.append(shape)
            try:
                run_case(case, device, limits, seed)
            except Mismatch as error:
                raise Mismatch(f"{case!r} on {device.name}, seed {seed}, {shape}: {error}") from error
