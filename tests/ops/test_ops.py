"""Every op case on every Vulkan device present, against the numpy twins.

Runs with the constants chosen for the device and with those of the floor, there with folded grids; the
cases of every weight type with the former alone, as each costs its compilation.
One case: pytest tests/ops/test_ops.py --case "MatVec.*q4_0"; a failure's seed: VKBACKEND_TEST_SEED=N pytest
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import replace

import numpy as np
import pytest

from vkbackend.buffer import View
from vkbackend.executors import NumpyDevice
from vkbackend.limits import Limits
from vkbackend.recording import Dispatch, Recording
from vkbackend.runtime import Device
from vkbackend.tools.op_cases import CASES, FORMAT_CASES, WIDE_CASES
from vkbackend.tools.op_setup import Case, Placed

# Three workgroups in x, so that the fold into y, needed above 65,535, happens in small cases.
FLOOR = replace(Limits.floor(), max_groups=(3, 65_535, 65_535))
_ARRAYS = {"f32": np.float32, "f16": np.float16, "u32": np.uint32}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    pattern = re.compile(metafunc.config.getoption("--case") or "")
    params = [
        pytest.param(case, id=repr(case), marks=[pytest.mark.wide] if wide else [])
        for cases, wide in ((CASES, False), (WIDE_CASES, True))
        for case in cases
        if pattern.search(repr(case))
    ]
    metafunc.parametrize("case", params)


def check(case: Case, what: str, got: np.ndarray, want: np.ndarray) -> None:
    """NaN and inf in the same places first, then equal bits or the normalised mean square error."""
    if case.tolerance == 0 or what in case.exact:
        different = np.flatnonzero(got.reshape(-1).view(np.uint8) != want.reshape(-1).view(np.uint8))
        if different.size:
            at = different[0] // got.itemsize
            pytest.fail(
                f"{what}: {different.size} bytes differ, first {got.flat[at]!r}, want {want.flat[at]!r}"
            )
        return
    for name, test in (("NaN", np.isnan), ("inf", np.isinf)):
        wrong = np.flatnonzero(test(got) != test(want))
        if wrong.size:
            at = wrong[0]
            values = f"{got.flat[at]!r}, want {want.flat[at]!r}"
            pytest.fail(f"{what}: {wrong.size} wrong {name} of {got.size}, first at {at}: {values}")
    finite = np.isfinite(want)
    a, b = got[finite].astype(np.float64), want[finite].astype(np.float64)
    error = float(np.sum((a - b) ** 2)) / max(float(np.sum(b * b)), 1e-300)
    assert error <= case.tolerance, f"{what}: NMSE {error:.3g} > {case.tolerance:.3g}"


def unbounded(recording: Recording) -> Recording:
    """The recording with every binding reaching to the end of its buffer.

    A driver may drop accesses beyond a binding (lavapipe does), which would hide them from the guard words.
    """

    def widen(view: View) -> View:
        return View(view.buffer, view.offset, ((view.buffer.nbytes - view.offset) // 4,), "u32")

    wide = Recording(recording.name)
    for command in recording.commands:
        assert isinstance(command, Dispatch), command
        wide.dispatch(replace(command, args=tuple(map(widen, command.args))))
    return wide


def run(case: Case, device: Device, limits: Limits, seed: int) -> None:
    setup = case.setup(np.random.default_rng(seed))
    here, oracle = Placed(device, setup), Placed(NumpyDevice("numpy"), setup)
    try:
        device.run(unbounded(here.record(limits)))
        oracle.device.run(oracle.record(limits))
        after, want = device.read(here.whole), oracle.device.read(oracle.whole)
        untouched = np.ones(here.image.size, bool)
        for name, tensor in setup.tensors.items():
            if tensor.written:
                view: View = here.views[name]
                inside = slice(view.offset, view.end)
                untouched[inside] = False
                n = int(np.prod(view.shape))
                arrays = [
                    raw[inside].view(_ARRAYS[view.dtype])[:n].reshape(view.shape) for raw in (after, want)
                ]
                got_parts, want_parts = (case.parts(name, array) for array in arrays)
                for part, values in want_parts.items():
                    check(case, part, got_parts[part], values)
        overwritten = np.flatnonzero((after != here.image) & untouched)
        if overwritten.size:
            at = int(overwritten[0])
            pytest.fail(f"{overwritten.size} bytes outside the outputs were overwritten, first at byte {at}")
    finally:
        here.close()
        oracle.close()


def test_op(case: Case, device: Device) -> None:
    seed = int(os.environ.get("VKBACKEND_TEST_SEED") or secrets.randbelow(1 << 31))
    done: list[object] = []
    for limits in (device.limits,) if case in FORMAT_CASES else (device.limits, FLOOR):
        probe = Placed(NumpyDevice("probe"), case.setup(np.random.default_rng(seed)))
        shape = [(c.consts, c.groups) for c in probe.record(limits).accesses() if isinstance(c, Dispatch)]
        probe.close()
        if shape not in done:
            done.append(shape)
            try:
                run(case, device, limits, seed)
            except (AssertionError, pytest.fail.Exception) as error:
                raise AssertionError(f"{case!r} on {device.name}, seed {seed}, {shape}: {error}") from error
