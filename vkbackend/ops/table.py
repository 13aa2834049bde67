"""The table of matrix ops: an entry has all that is known of a shader, and nothing else names it.

Of the entries that suit the device, the rows of x and the type of the weights, the first one runs, unless
`vkbackend tune` measured another to be faster. A new variant is an entry here, its shader, its line in
shaders/variants.toml and its case in tools/op_cases. A grid that no other entry uses may stand here, too.
"""

from __future__ import annotations

from collections.abc import Callable

from vkbackend.limits import Limits
from vkbackend.ops.experts import (
    EITHER,
    GROUPED,
    SINGLE,
    ExpertsOp,
    pairs_by_lanes,
    pairs_by_units,
    tiles_of_pairs,
)
from vkbackend.ops.matrix import (
    FEW,
    MANY,
    Grid,
    MatrixOp,
    Size,
    dot_tiles,
    rows_by_lanes,
    rows_by_subgroups,
    rows_by_threads,
    tiles_by_size,
    tiles_of_64,
)
from vkbackend.ops.spec import SPECS, OpSpec
from vkbackend.ops.units import UNIT_TILE, int8_tiles_of_units, tiles_of_units

# ---- optional features ----

SUBGROUPS = ("subgroup_arithmetic", "full_subgroups")
DOTS = ("int_dot",)
LANES = ("buffer_address", "subgroup_shuffle", "full_subgroups")
UNITS = ("matrix_units", "full_subgroups")
INT8_UNITS = (*UNITS, "int8_units")

# ---- devices ----


def anywhere(limits: Limits) -> bool:
    return True


def on_gpus(limits: Limits) -> bool:
    return not limits.is_cpu


def fast_lanes(limits: Limits) -> bool:
    """Where invocations are SIMD lanes, and enough of them: ops of lanes are 5 to 10 times as fast as the
    others on lavapipe (8 lanes), half as fast on SwiftShader (4 lanes)."""
    return limits.is_cpu and limits.subgroup_size >= 8 and limits.features.issuperset(LANES)


def fast_dots(limits: Limits) -> bool:
    """Where dot products of integers have instructions of their own."""
    return not limits.is_cpu and "int_dot_accelerated" in limits.features


def fused(grid: Callable[[Limits, Size], Grid]) -> Callable[[Limits, Size], Grid]:
    """A grid with FUSED: GPUs that have instructions for dot products have an fma that rounds once."""

    def with_fused(limits: Limits, size: Size) -> Grid:
        cut = grid(limits, size)
        return cut._replace(consts=cut.consts | {"FUSED": int(fast_dots(limits))})

    return with_fused


def fast_int8_units(limits: Limits) -> bool:
    """GPUs whose matrix units multiply integers four times as fast as halves. Where it is twice, or as fast,
    halves win: the scales of every block of integers take longer (docs/measurements/kernels.md)."""
    return not limits.is_cpu and "int8_units_fast" in limits.features


def fast_waves(limits: Limits) -> bool:
    """GPUs whose subgroups are wide enough for a row of w."""
    return not limits.is_cpu and limits.subgroup_size >= 16


def fast_tiles(limits: Limits) -> bool:
    """GPUs. SwiftShader needs up to twice the time of mat_mul for mat_tile."""
    return not limits.is_cpu and limits.subgroup_size > 1


# ---- products with a matrix, the best first ----

# Columns: name, grid, specialization constants after LOCAL, rows of x, devices that run it, type of x,
# optional features, devices that run it for gate and up at once.
MATRIX_OPS: dict[str, MatrixOp] = {
    op.name: op
    for op in (
        MatrixOp("mat_lane", rows_by_lanes, "N SUBGROUP", FEW + MANY, fast_lanes, "f32", LANES, anywhere),
        MatrixOp(
            "mat_dot", rows_by_subgroups, "ROWS N WIDE", FEW, fast_dots, "q8", DOTS + SUBGROUPS, anywhere
        ),
        # Sums meet in a subgroup.
        MatrixOp("mat_wave", rows_by_subgroups, "ROWS N WIDE", FEW, fast_waves, "f32", SUBGROUPS, anywhere),
        # Sums meet in shared memory. On a CPU a thread has a row of w to itself, so nothing has to meet; with
        # gate and up it would.
        MatrixOp("mat_vec", rows_by_threads, "TPR N FOURS", FEW, anywhere, gates=on_gpus),
        MatrixOp(
            "mat_mul_dot_coop",
            int8_tiles_of_units,
            f"{UNIT_TILE} WIDE",
            MANY,
            fast_int8_units,
            "q8",
            INT8_UNITS,
            gpus_only=True,
        ),
        MatrixOp(
            "mat_mul_coop",
            tiles_of_units,
            f"{UNIT_TILE} WIDE",
            MANY,
            fast_tiles,
            "f16s",
            UNITS,
            gpus_only=True,
        ),
        MatrixOp("mat_mul_dot", fused(dot_tiles), "RN FUSED", MANY, fast_dots, "q8", DOTS),
        # As mat_mul, with more of its operands in registers.
        MatrixOp("mat_tile", tiles_by_size, "RM RN FOURS", MANY, fast_tiles, gpus_only=True),
        MatrixOp("mat_mul", tiles_of_64, "RN FOURS", MANY, anywhere),
    )
}

# ---- products with experts, the best first ----

# Columns: name, grid, specialization constants between LOCAL and AXIS, its way through the pairs, devices
# that run it, type of x, optional features.
EXPERTS_OPS: dict[str, ExpertsOp] = {
    op.name: op
    for op in (
        ExpertsOp("mat_lane_id", pairs_by_lanes, "N SUBGROUP", EITHER, fast_lanes, needs=LANES),
        ExpertsOp("mat_vec_id", rows_by_threads, "TPR", SINGLE, anywhere),
        ExpertsOp("mat_dot_id", rows_by_subgroups, "ROWS", SINGLE, anywhere, "q8", DOTS + SUBGROUPS),
        ExpertsOp("mat_mul_id", tiles_of_pairs, "RN", GROUPED, anywhere),
        ExpertsOp("mat_mul_dot_id", fused(tiles_of_pairs), "RN FUSED", GROUPED, anywhere, "q8", DOTS),
        ExpertsOp("mat_mul_id_coop", pairs_by_units, UNIT_TILE, GROUPED, anywhere, "f16s", UNITS),
    )
}

# ---- all ops ----

OPS: dict[str, OpSpec] = {
    **SPECS,
    **{name: op.spec for name, op in MATRIX_OPS.items()},
    **{name: op.spec for name, op in EXPERTS_OPS.items()},
}
