"""Run an op case on a device and compare it with the numpy twin, for tests and `vkbackend verify`.

NaN and inf must be in the same elements as in the twin's result, and errors must be within the tolerance.
Bytes outside the outputs must not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from vkbackend.buffer import View
from vkbackend.errors import VkbackendError
from vkbackend.formats import row_nbytes
from vkbackend.limits import Limits
from vkbackend.recording import Dispatch, Recording
from vkbackend.runtime import Device
from vkbackend.tools.op_cases.cases import FORMAT_CASES
from vkbackend.tools.op_cases.setup import Case, Placed
from vkbackend.twins.device import NumpyDevice

# A limit of 3 workgroups in x makes small cases use y too. The real limit is 65,535.
FLOOR = replace(Limits.floor(), max_groups=(3, 65_535, 65_535))
_ARRAYS = {"f32": np.float32, "f16": np.float16, "u32": np.uint32}


def limits_for(case: Case, device: Device, *, once: bool) -> list[Limits]:
    """Return the device's limits. If `once` is not set, also return the portable limits. If the case needs
    features, add the device's features to these limits. Omit limits under which the op cannot run."""
    have = device.limits
    if not have.features.issuperset(case.needs):
        return []
    with_needs = replace(
        FLOOR, features=have.features, subgroup_size=have.subgroup_size, matrix_units=have.matrix_units
    )
    wanted = [have] if once else [have, with_needs if case.needs else FLOOR]
    return [limits for limits in wanted if case.fits(limits)]


class Mismatch(AssertionError):
    """A device's result differs from the twin's result."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The dispatches of a case: names (op.variant), constants and grids."""

    names: tuple[str, ...]
    how: tuple[object, ...]


def shape_of(case: Case, limits: Limits, seed: int) -> Shape:
    probe = Placed(NumpyDevice("probe"), case.setup(np.random.default_rng(seed)))
    dispatches = [c for c in probe.record(limits).accesses() if isinstance(c, Dispatch)]
    probe.close()
    return Shape(
        tuple(f"{c.op}.{c.variant}" for c in dispatches), tuple((c.consts, c.groups) for c in dispatches)
    )


def run_case(case: Case, device: Device, limits: Limits, seed: int) -> float:
    """Return the largest NMSE of the case's outputs. Raises Mismatch."""
    setup = case.setup(np.random.default_rng(seed))
    here, oracle = Placed(device, setup), Placed(NumpyDevice("numpy"), setup)
    worst = 0.0
    try:
        device.run(_unbounded(here.record(limits), device.limits.max_storage_range))
        oracle.device.run(oracle.record(limits))
        after, want = device.read(here.whole), oracle.device.read(oracle.whole)
        untouched = np.ones(here.image.size, bool)
        for name, tensor in setup.tensors.items():
            if tensor.written:
                view: View = here.views[name]
                inside = slice(view.offset, view.end)
                untouched[inside] = False
                arrays = [_array_of(raw[inside], view) for raw in (after, want)]
                got_parts, want_parts = (case.parts(name, array) for array in arrays)
                for part, values in want_parts.items():
                    worst = max(worst, _check(case, part, got_parts[part], values))
        overwritten = np.flatnonzero((after != here.image) & untouched)
        if overwritten.size:
            at = int(overwritten[0])
            raise Mismatch(
                f"{overwritten.size} bytes outside the outputs were overwritten, first at byte {at}"
            )
    finally:
        here.close()
        oracle.close()
    return worst


class Checked(NamedTuple):
    shaders: tuple[str, ...]
    error: float
    failure: str


def check_case(case: Case, device: Device, seed: int) -> Iterator[Checked]:
    done: list[object] = []
    for limits in limits_for(case, device, once=case in FORMAT_CASES):
        shape = shape_of(case, limits, seed)
        if shape in done or is_lost(device):
            continue
        done.append(shape)
        failure, error = "", 0.0
        try:
            error = run_case(case, device, limits, seed)
        except (Mismatch, VkbackendError) as problem:
            failure = str(problem)
        yield Checked(tuple(dict.fromkeys(shape.names)), error, failure)


def is_lost(device: Device) -> bool:
    return device.abandoned or getattr(device, "lost", False)


def _array_of(raw: np.ndarray, view: View) -> np.ndarray:
    if view.dtype in _ARRAYS:
        n = int(np.prod(view.shape))
        return raw.view(_ARRAYS[view.dtype])[:n].reshape(view.shape)
    rows, width = int(np.prod(view.shape[:-1])), row_nbytes(view.dtype, view.shape[-1])
    return raw[: rows * width].reshape(rows, width)


def _check(case: Case, part: str, got: np.ndarray, want: np.ndarray) -> float:
    if case.tolerance == 0 or part in case.exact:
        word = f"u{got.itemsize}"
        wrong = got.view(word) != want.view(word)
        if got.dtype.kind == "f" and case.any_nan:
            wrong &= ~(np.isnan(got) & np.isnan(want))
        if wrong.any():
            at = int(np.argmax(wrong))
            values = f"{got.flat[at]!r}, want {want.flat[at]!r}"
            raise Mismatch(f"{part}: {np.count_nonzero(wrong)} values differ, first at {at}: {values}")
        return 0.0
    for name, test in (("NaN", np.isnan), ("inf", np.isinf)):
        wrong = np.flatnonzero(test(got) != test(want))
        if wrong.size:
            at = wrong[0]
            values = f"{got.flat[at]!r}, want {want.flat[at]!r}"
            raise Mismatch(f"{part}: {wrong.size} wrong {name} of {got.size}, first at {at}: {values}")
    finite = np.isfinite(want)
    a, b = got[finite].astype(np.float64), want[finite].astype(np.float64)
    error = float(np.sum((a - b) ** 2)) / max(float(np.sum(b * b)), 1e-300)
    if not error <= case.tolerance:
        raise Mismatch(f"{part}: NMSE {error:.3g} > {case.tolerance:.3g}")
    return error


def _unbounded(recording: Recording, max_range: int) -> Recording:
    """Extend every binding to the end of its buffer or to the binding limit. Drivers such as lavapipe may
    drop writes beyond a binding, and then guard words would not show the error."""

    def widen(view: View) -> View:
        # The binding may start up to 256 bytes before the view, at an aligned offset.
        reach = min(view.buffer.nbytes - view.offset, max_range - 256)
        nbytes = max(view.nbytes, reach)
        return View(view.buffer, view.offset, (nbytes // 4,), "u32")

    wide = Recording(recording.name)
    for command in recording.commands:
        assert isinstance(command, Dispatch), command
        wide.dispatch(replace(command, args=tuple(map(widen, command.args))))
    return wide
