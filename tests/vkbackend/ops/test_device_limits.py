"""On every simulated device, each op records dispatches that the device can run: their features, workgroups,
shared memory and push constants are within its limits. No device compiles or runs anything here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from shared_memory import shared_nbytes

from vkbackend import ops, shaderlib
from vkbackend.limits import Limits
from vkbackend.ops.spec import PUSH_NBYTES
from vkbackend.recording import Dispatch
from vkbackend.tools.op_cases.cases import CASES, FORMAT_CASES, WIDE_CASES
from vkbackend.tools.op_cases.setup import Case, Placed
from vkbackend.twins.device import NullDevice

pytestmark = pytest.mark.no_vulkan

PLAIN = frozenset({"subgroup_arithmetic", "subgroup_shuffle", "full_subgroups"})
EVERY = PLAIN | {"buffer_address", "int_dot"}
LARGE = Limits(1024, 32_768, max_storage_range=1 << 31)
DEVICES = {
    "Vulkan 1.1's minimum": Limits(),
    # These limits are from Mesa's drivers (docs/measurements/arm.md).
    "Imagination BXS-4-64": Limits(features=frozenset({"int_dot"})),
    "Raspberry Pi 5": Limits(
        256,
        max_storage_range=1 << 30,
        subgroup_size=16,
        features=EVERY - {"subgroup_arithmetic"},
    ),
    "Mali-G610": replace(LARGE, subgroup_size=16, features=EVERY | {"float16", "int_dot_accelerated"}),
    "Adreno 660": replace(LARGE, subgroup_size=128, features=EVERY | {"float16"}),
    "Apple M1": replace(LARGE, subgroup_size=32, features=EVERY | {"float16"}),
} | {
    f"subgroups of {n}": Limits(max(128, n), subgroup_size=n, features=EVERY) for n in (4, 8, 16, 32, 64, 128)
}
PORTABLE = {name for name, spec in ops.OPS.items() if not spec.needs}


def excess(d: Dispatch, limits: Limits) -> Iterable[str]:
    """Return what of a dispatch exceeds the limits."""
    spec, consts = ops.OPS[d.op], dict(d.consts)
    if missing := set(spec.needs) - limits.features:
        yield f"needs {sorted(missing)}"
    if consts["LOCAL"] > limits.max_invocations:
        yield f"{consts['LOCAL']} invocations"
    if "full_subgroups" in spec.needs and consts["LOCAL"] % limits.subgroup_size:
        yield f"{consts['LOCAL']} invocations are not full subgroups"
    if any(n > most for n, most in zip(d.groups, limits.max_groups, strict=True)):
        yield f"workgroups {d.groups}"
    if any(view.nbytes > limits.max_storage_range for view in d.bindings):
        yield "a large binding"
    if 4 * (len(d.args) * (1 + d.addressed) + len(d.push)) > PUSH_NBYTES:
        yield "push constants"
    code = shaderlib.spirv(d.op, d.variant)
    if (nbytes := shared_nbytes(code, [value for _, value in d.consts])) > limits.max_shared_nbytes:
        yield f"{nbytes} bytes of shared memory"


def check(cases: Iterable[Case], names: Iterable[str]) -> dict[str, set[str]]:
    """Return the ops that each device records."""
    recorded: dict[str, set[str]] = {name: set() for name in names}
    seen: set[tuple[object, ...]] = set()
    faults = []
    for case in cases:
        placed = Placed(NullDevice("null"), case.setup(np.random.default_rng(1)))
        for name in recorded:
            limits = DEVICES[name]
            if not limits.features.issuperset(case.needs) or not case.fits(limits):
                continue
            for d in placed.record(limits).accesses():
                if isinstance(d, Dispatch):
                    recorded[name].add(d.op)
                    key = name, d.op, d.variant, d.consts, d.groups
                    if key not in seen:
                        seen.add(key)
                        faults += [
                            f"{name}: {case!r}: {d.op} {d.consts}: {what}" for what in excess(d, limits)
                        ]
        placed.close()
    assert not faults, "\n".join(faults[:20])
    return recorded


def test_one_case_of_each_op() -> None:
    firsts = {type(case): case for case in reversed([*CASES, *FORMAT_CASES])}
    for name, recorded in check(firsts.values(), DEVICES).items():
        assert recorded >= PORTABLE, name


@pytest.mark.wide
@pytest.mark.timeout(1800)
def test_every_case() -> None:
    check([*CASES, *FORMAT_CASES, *WIDE_CASES], DEVICES)


def test_the_check_finds_faults() -> None:
    case = next(case for case in CASES if type(case).__name__ == "MatTile")
    placed = Placed(NullDevice("null"), case.setup(np.random.default_rng(1)))
    d = next(c for c in placed.record(Limits()).accesses() if isinstance(c, Dispatch))
    nbytes = shared_nbytes(shaderlib.spirv(d.op, d.variant), [value for _, value in d.consts])
    assert not list(excess(d, Limits(max_shared_nbytes=nbytes)))
    small = Limits(32, nbytes - 1, max_groups=(0, 1, 1), max_storage_range=3)
    assert len(list(excess(d, small))) == 4


def test_shared_memory_of_a_module() -> None:
    for local, heads, sinks, splits in ((64, 40, 0, 1), (128, 128, 1, 37)):
        code = shaderlib.spirv("attn_combine", "f32")
        assert ops.OPS["attn_combine"].consts == ("LOCAL", "HEAD_V", "HAS_SINKS", "MAX_SPLITS")
        assert shared_nbytes(code, (local, heads, sinks, splits)) == 3 * 4 * splits
    assert ops.OPS["moe_logits"].consts[:2] == ("LOCAL", "N")
    assert shared_nbytes(shaderlib.spirv("moe_logits", "f32"), (64, 3)) == 4 * 3 * 64
