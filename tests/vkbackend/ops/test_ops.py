"""Every op case runs on a Vulkan device and must equal the numpy twins.

There are two ways to run a case: with the device's constants, or with the smallest GPU's constants and folded
grids. With --all, cases run in both ways on every driver. Each case of the wide sweep runs in only one way on
one driver. Ways and drivers alternate. By default, only the first case of each op runs in both ways. Other
drivers run only this case, because they keep no compiled code. Cases of every weight type run in one way,
because compiling them takes long. Two thirds of the pairs of an op and a weight type run only with --all. By
default each type still runs with several ops. This command runs one case: pytest
tests/vkbackend/ops/test_ops.py --all --case "MatVec.*q4_0". VKBACKEND_TEST_SEED=N pytest repeats a failure
with its seed.
"""

from __future__ import annotations

import os
import re
import secrets

import pytest
from device_sets import device_params

from vkbackend.runtime import Device
from vkbackend.tools.op_cases.cases import CASES, FORMAT_CASES, WIDE_CASES
from vkbackend.tools.op_cases.check import Mismatch, Shape, limits_for, run_case, shape_of
from vkbackend.tools.op_cases.setup import Case

CHOOSES_DEVICES = True  # see conftest.py
CODEBOOKS = ("iq1", "iq2", "iq3")
OPS = list(dict.fromkeys(type(case) for case in FORMAT_CASES))
TYPES = list(dict.fromkeys(case.type for case in FORMAT_CASES))
SELDOM = {case for case in FORMAT_CASES if (OPS.index(type(case)) + TYPES.index(case.type)) % 3}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    pattern = re.compile(metafunc.config.getoption("--case") or "")
    every = metafunc.config.getoption("--all")
    # Every driver, and every runtime on one driver, runs the first case of each op and each codebook.
    kinds: set[object] = set()
    params = []
    devices = device_params()
    for number, case in enumerate((*CASES, *WIDE_CASES) if every else CASES):
        turn = number + number // 8  # a sweep has 8 consecutive cases with different numbers of rows
        kind = type(case), any(str(value).startswith(CODEBOOKS) for value in vars(case).values())
        first = kind not in kinds
        kinds.add(kind)
        if case in SELDOM and not (first or every):
            continue
        if not pattern.search(repr(case)):
            continue
        for i, of in enumerate(devices):
            way = None  # both ways
            if not first and number >= len(CASES):
                if i != turn % len(devices):
                    continue
                way = turn // len(devices)
            elif not (first or every):
                if i:
                    continue
                way = -1
            # A runtime places and submits all ops in the same way, so a fifth of the ops is enough to test a
            # runtime.
            every_runtime = first and (every or (i == 0 and len(kinds) % 5 == 0))
            marks = [*of.marks, *([pytest.mark.runtimes] if every_runtime else [])]
            params.append(pytest.param(case, way, *of.values, id=f"{case!r}-{of.id}", marks=marks))
    if not params:
        raise pytest.UsageError(f"no op case matches --case {pattern.pattern} (--all adds the wide sweep)")
    metafunc.parametrize(("case", "way", "device"), params, indirect=["device"], scope="session")


def test_op(case: Case, way: int | None, device: Device) -> None:
    seed = int(os.environ.get("VKBACKEND_TEST_SEED") or secrets.randbelow(1 << 31))
    done: list[Shape] = []
    if not (every := limits_for(case, device, once=case in FORMAT_CASES)):
        pytest.skip(f"{device.name} lacks {', '.join(sorted(set(case.needs) - device.limits.features))}")
    for limits in every if way is None else [every[way % len(every)]]:
        shape = shape_of(case, limits, seed)
        if shape not in done:
            done.append(shape)
            try:
                run_case(case, device, limits, seed)
            except Mismatch as error:
                raise Mismatch(f"{case!r} on {device.name}, seed {seed}, {shape}: {error}") from error
