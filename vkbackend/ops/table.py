"""The shaders that multiply by a matrix or by experts, in order of preference.

A product uses the first entry that suits the device, the rows of x and the weight type, unless `vkbackend
tune` measured a faster op. A new op needs an entry here, a shader, a line in shaders/variants.toml and a case
in tools/op_cases.
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

# ---- features ----

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
    """On lavapipe (8 lanes), mat_lane and mat_lane_id are 5 to 10 times as fast as other ops. On SwiftShader
    (4 lanes), they are half as fast as other ops."""
    return limits.is_cpu and limits.subgroup_size >= 8 and limits.features.issuperset(LANES)


def fast_dots(limits: Limits) -> bool:
    return not limits.is_cpu and "int_dot_accelerated" in limits.features


def fused(grid: Callable[[Limits, Size], Grid]) -> Callable[[Limits, Size], Grid]:
    """Add FUSED to a grid's specialization constants. It is 1 on GPUs with dot product instructions, because
    their fma rounds only once."""

    def with_fused(limits: Limits, size: Size) -> Grid:
        cut = grid(limits, size)
        return cut._replace(consts=cut.consts | {"FUSED": int(fast_dots(limits))})

    return with_fused


def fast_int8_units(limits: Limits) -> bool:
    """Prefer int8 matrix units only if they are four times as fast as F16, because int8 products scale every
    block (docs/measurements/kernels.md)."""
    return not limits.is_cpu and "int8_units_fast" in limits.features


def fast_waves(limits: Limits) -> bool:
    """Return whether subgroups are wide enough for one subgroup per row of w."""
    return not limits.is_cpu and limits.subgroup_size >= 16


def fast_tiles(limits: Limits) -> bool:
    """On SwiftShader, mat_tile takes up to twice as long as mat_mul."""
    return not limits.is_cpu and limits.subgroup_size > 1


# ---- matrix ops, best first ----

# The columns are the fields of MatrixOp.
MATRIX_OPS: dict[str, MatrixOp] = {
    op.name: op
    for op in (
        MatrixOp("mat_lane", rows_by_lanes, "N SUBGROUP", FEW + MANY, fast_lanes, "f32", LANES, anywhere),
        MatrixOp(
            "mat_dot", rows_by_subgroups, "ROWS N WIDE", FEW, fast_dots, "q8", DOTS + SUBGROUPS, anywhere
        ),
        # Sums are combined within a subgroup.
        MatrixOp("mat_wave", rows_by_subgroups, "ROWS N WIDE", FEW, fast_waves, "f32", SUBGROUPS, anywhere),
        # On GPUs, and for gate and up on CPUs, sums are combined in shared memory. For other products, a CPU
        # thread computes a complete row of w.
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
        # Like mat_mul, but with more operands in registers.
        MatrixOp("mat_tile", tiles_by_size, "RM RN FOURS", MANY, fast_tiles, gpus_only=True),
        MatrixOp("mat_mul", tiles_of_64, "RN FOURS", MANY, anywhere),
    )
}

# ---- expert ops, best first ----

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


OPS: dict[str, OpSpec] = {
    **SPECS,
    **{name: op.spec for name, op in MATRIX_OPS.items()},
    **{name: op.spec for name, op in EXPERTS_OPS.items()},
}
