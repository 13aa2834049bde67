"""Ops run with limits above Vulkan's minimum, so they use the largest workgroups and read several quads
ahead."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from device_sets import wide, with_devices

from vkbackend.runtime import Device
from vkbackend.tools.op_cases.attention import AttnDecode, AttnPrefill
from vkbackend.tools.op_cases.check import run_case, shape_of
from vkbackend.tools.op_cases.indexer import IndexMaxima, IndexTopK
from vkbackend.tools.op_cases.quantized import MatMulDot, MatMulDotId
from vkbackend.tools.op_cases.reduces import AddPartials
from vkbackend.tools.op_cases.rows import RmsNorm
from vkbackend.tools.op_cases.setup import Case

CHOOSES_DEVICES = True
CASES = [
    RmsNorm(2050, 2),
    # 512 invocations with four quads each cannot read these rows at once
    RmsNorm(4128, 2, out="q8"),
    AddPartials(2050, 2, n_slots=3, own=1, writers=0b111, in_place=True),
    AddPartials(4128, 2, n_slots=3, own=1, writers=0b101, out="q8"),
]


@pytest.mark.parametrize(("case", "device"), with_devices([], CASES), indirect=["device"], scope="session")
def test_large_workgroups(case: Case, device: Device) -> None:
    if device.limits.max_invocations <= 128:
        pytest.skip(f"{device.name} has workgroups of {device.limits.max_invocations} at most")
    limits, seed = replace(device.limits, is_cpu=False), secrets.randbelow(1 << 31)
    ((consts, _),) = shape_of(case, limits, seed).how  # type: ignore[misc]
    assert dict(consts)["LOCAL"] == min(512, device.limits.max_invocations), consts
    run_case(case, device, limits, seed)


RUNS = ((2, 30, 3), (0, 0, 1), (3, 95, 2))
ATTENTION = [
    AttnDecode(RUNS, 6, 2, 64, 64, n_splits=3, window=20),
    AttnDecode(RUNS, 4, 2, 96, 32, None, "q8_0", "q4_0", sinks=True),
    AttnDecode(RUNS, 4, 2, 128, 64, None, "q8_0", "q4_0"),
    AttnDecode(((0, 63, 2),), 2, 2, 80, 40, 2, "f32", "bf16", softcap=4.0),
    AttnPrefill(((0, 60, 9),), 2, 1, 64, 128, 7, "q4_0", "q8_0"),
]
MORE_ATTENTION = [
    AttnDecode(((0, 40, 1),), 1, 1, 576, 512, None, "f16", "f32"),
    AttnDecode(RUNS, 8, 1, 128, 64, None, "q8_0", "f16"),
    AttnDecode(((0, 63, 2),), 4, 2, 256, 128, 2, "q4_0", "q8_0"),
    AttnPrefill(((1, 0, 17), *RUNS[:2], (3, 40, 33)), 4, 2, 64, 64, pad=10, window=20),
    AttnPrefill(((0, 60, 9),), 2, 2, 160, 40, 7, "q8_0", "f32", sinks=True),
    # two blocks of K together are a multiple of 4 bytes
    AttnPrefill(((0, 60, 9),), 2, 1, 128, 64, 7, "q8_0", "q4_0"),
]


@pytest.mark.parametrize(
    ("case", "device"),
    [*with_devices(ATTENTION[:1], ATTENTION[1:]), *map(wide, with_devices([], MORE_ATTENTION))],
    indirect=["device"],
    scope="session",
)
def test_attention_with_many_concurrent_reads(case: Case, device: Device) -> None:
    limits, seed = replace(device.limits, is_cpu=False), secrets.randbelow(1 << 31)
    ((consts, _),) = shape_of(case, limits, seed).how  # type: ignore[misc]
    assert dict(consts)["BATCH"] == (4 if dict(consts).get("HEADS", 1) > 4 else 8), consts
    run_case(case, device, limits, seed)


CHOICES = [
    IndexTopK(((0, 4999, 1), (1, 2999, 1)), 2048, values=10**7),
    IndexTopK(((1, 300, 2), (0, 4000, 2)), 5, values=9, n_lists=3, block=7),
    IndexMaxima(((1, 300, 2), (0, 127, 2)), 17, 32, 64, 1, "q8_0", first_row=1),
]


@pytest.mark.parametrize(("case", "device"), with_devices([], CHOICES), indirect=["device"], scope="session")
def test_counts_of_many_threads(case: Case, device: Device) -> None:
    limits, seed = replace(device.limits, is_cpu=False), secrets.randbelow(1 << 31)
    ((consts, _),) = shape_of(case, limits, seed).how  # type: ignore[misc]
    assert dict(consts)["LOCAL"] >= 64, consts
    run_case(case, device, limits, seed)


# K types, and how many vectors a GPU like Mali reads ahead: subgroups of 16, no matrix units.
NARROW = [("f16", 4), ("q8_0", 8)]


@pytest.mark.parametrize(("read", "device"), with_devices([], NARROW), indirect=["device"], scope="session")
def test_prefill_with_few_registers(read: tuple[str, int], device: Device) -> None:
    limits = replace(device.limits, is_cpu=False, subgroup_size=16, features=frozenset())
    case, seed = AttnPrefill(((1, 0, 17), (2, 30, 3)), 2, 1, 64, 64, 7, read[0]), secrets.randbelow(1 << 31)
    ((consts, _),) = shape_of(case, limits, seed).how  # type: ignore[misc]
    assert dict(consts)["BATCH"] == read[1], consts
    run_case(case, device, limits, seed)


@dataclass(frozen=True)
class FusedDot(MatMulDot):
    tolerance: ClassVar[float] = 4e-6  # CPU drivers round an fma twice, with an error of 1e-6 for Q2_K


@dataclass(frozen=True)
class FusedDotId(MatMulDotId):
    tolerance: ClassVar[float] = 4e-6


DOTS: list[Case] = [FusedDot("q4_k", 65, 512, 17), FusedDotId("q6_k", side=256, rows=9)]
MORE_DOTS: list[Case] = [FusedDot(kind, 65, 512, 17) for kind in ("q8_0", "q2_k", "mxfp4")]


@pytest.mark.parametrize(
    ("case", "device"), with_devices(DOTS[:1], [*DOTS[1:], *MORE_DOTS]), indirect=["device"], scope="session"
)
def test_dots_that_start_with_floats(case: Case, device: Device) -> None:
    if not device.limits.features.issuperset(case.needs):
        pytest.skip(f"{device.name} lacks {', '.join(sorted(set(case.needs) - device.limits.features))}")
    features = device.limits.features | {"int_dot_accelerated"}
    limits, seed = replace(device.limits, is_cpu=False, features=features), secrets.randbelow(1 << 31)
    ((consts, _),) = shape_of(case, limits, seed).how  # type: ignore[misc]
    assert dict(consts)["FUSED"] == 1, consts
    run_case(case, device, limits, seed)
