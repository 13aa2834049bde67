"""Compilers for absent GPUs report that no kernel spills registers. Counts of instructions equal
docs/measurements/kernels.csv. Everything here needs --all.
"""

from __future__ import annotations

import csv
import re
from functools import cache

import pytest
from places import ROOT

from vkbackend.ops.table import OPS
from vkbackend.tools.measure import compilers
from vkbackend.tools.measure.kernel_row import KernelRow
from vkbackend.tools.studies.count_instructions import RECORDED, RECORDED_GPUS, rows_of

# By default, these kernels are compiled: every product with one format per family, attention with the usual
# head size, and scans. NAVI21 adds the kernels for GPUs without matrix units.
PRODUCTS = r"'(f16|q4_0|q6_k)', n=3072, k=1024, rows={rows},|Id\((type=)?'{kinds}'|^Attn.*head_k=128"
SAMPLES = {
    "NAVI31": PRODUCTS.format(rows="(1|16|512)", kinds="(f16|q4_0|q6_k)") + f"|^Index|^SsmScan|{RECORDED}",
    "NAVI21": PRODUCTS.format(rows="(1|16|512)", kinds="q4_0"),
}
# These kernels of a driver spill. Some have arrays whose index is unknown at compile time. Intel's kernels of
# attention are never chosen.
ARRAYS = (
    ("anv", r"delta_chunk\."),
    ("anv", r"attn_(decode|chosen|blocks)_coop\."),
    ("anv", r"attn_prefill_coop\..* HEAD_V=512 "),
    ("nvk", r"delta_chunk\."),
    ("nvk", r"attn_decode\.f32 LOCAL=128 HEAD_K=8 "),
)


@cache
def rows(gpu: str, pattern: str) -> list[KernelRow]:
    if why := compilers.missing(compilers.GPUS[gpu]):
        pytest.skip(why)
    return rows_of(gpu, ["-c", pattern])


# (GPU, op) pairs of ARM_GPUS with spills. The delta_chunk of BXS-4-64 has an array in memory.
SPILLING_ON_ARM = {
    ("A660", "mat_mul_dot_id"),
    ("G610", "mat_wave"),
    ("G610", "attn_prefill"),
    ("G610", "mat_mul_dot_id"),
    ("V3D42", "mat_mul_dot"),
    ("V3D71", "mat_mul_dot"),
    ("BXS-4-64", "mat_mul_dot_id"),
    ("BXS-4-64", "delta_chunk"),
}


@pytest.mark.wide
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("gpu", compilers.ARM_GPUS)
def test_every_op_compiles_for_arm(gpu: str) -> None:
    """One case of each op, except for ops that need matrix units."""
    if why := compilers.missing(compilers.ARM_GPUS[gpu]):
        pytest.skip(why)
    compiled = rows_of(gpu, ["-c", ".", "--per-op", "1"])
    by_op = {row.kernel.split(".")[0]: row for row in compiled}
    with_lanes = {"mat_wave", "mat_dot", "mat_dot_id", "mat_mul_dot", "mat_mul_dot_id"}
    portable = {name for name, op in OPS.items() if not op.needs}
    assert portable <= by_op.keys() <= portable | with_lanes
    assert all(row.instructions for row in compiled)
    assert {(gpu, name) for name, row in by_op.items() if row.spills or row.scratch} <= SPILLING_ON_ARM


def spilling(gpu: str, pattern: str) -> list[str]:
    driver = compilers.GPUS[gpu].driver
    return [
        f"{row.kernel}: {row.spills} spills, {row.scratch} bytes of scratch"
        for row in rows(gpu, pattern)
        if (row.spills or row.scratch)
        and not any(driver == of and re.match(kernel, row.kernel) for of, kernel in ARRAYS)
    ]


@pytest.mark.wide
@pytest.mark.parametrize("gpu", SAMPLES)
def test_a_sample_does_not_spill(gpu: str) -> None:
    kernels = {row.kernel.split(".")[0] for row in rows(gpu, SAMPLES[gpu])}
    products = {
        "mat_dot",
        "mat_wave",
        "mat_tile",
        "mat_mul_dot",
        "mat_mul_dot_id",
        "mat_vec_id",
        "attn_prefill",
    }
    assert products <= kernels and ("mat_mul_coop" in kernels) == (gpu == "NAVI31")
    assert not spilling(gpu, SAMPLES[gpu])


@pytest.mark.wide
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("gpu", compilers.GPUS)
def test_nothing_spills(gpu: str) -> None:
    assert len(rows(gpu, ".")) > 700
    assert not spilling(gpu, ".")


@pytest.mark.wide
@pytest.mark.parametrize("gpu", RECORDED_GPUS)
def test_counts_equal_the_recorded_counts(gpu: str) -> None:
    """The counts are valid for the recorded Mesa version. If a kernel changes, record the counts again and
    explain the change."""
    with (ROOT / "docs" / "measurements" / "kernels.csv").open(encoding="utf-8") as file:
        recorded = [row for row in csv.DictReader(file) if row["gpu"] == gpu]
    assert recorded
    if why := compilers.missing(compilers.GPUS[gpu]):
        pytest.skip(why)
    if compilers.version(compilers.GPUS[gpu]) != recorded[0]["mesa"]:
        pytest.skip(f"{gpu} is recorded with Mesa {recorded[0]['mesa']}, which is not here")
    names = {row["kernel"] for row in recorded}
    counted = {row.kernel: row for row in rows(gpu, RECORDED) if row.kernel in names}
    assert set(counted) == names
    for name in ("instructions", "registers", "spills", "vector", "matrix", "loads", "load_nbytes"):
        now = {kernel: str(getattr(row, name)) for kernel, row in counted.items()}
        assert now == {row["kernel"]: row[name] for row in recorded}, name
