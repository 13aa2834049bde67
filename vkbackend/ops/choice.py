"""Chooses ops for matrices and experts. A matrix uses the fastest measured op (measured.py). Without
measurements, and for experts, the first suitable entry of table.py is used."""

from __future__ import annotations

from functools import cache

from vkbackend import shaderlib
from vkbackend.buffer import View
from vkbackend.limits import Limits
from vkbackend.ops.experts import EITHER, GROUPED, LANE_TILE, SINGLE, ExpertsOp, Groups
from vkbackend.ops.matrix import MAX_VEC_ROWS, row_class, rows_by_subgroups
from vkbackend.ops.table import EXPERTS_OPS, MATRIX_OPS, OPS, fast_dots, fast_lanes
from vkbackend.ops.target import Target, rows_of


def runs(limits: Limits, op: str, dtype: str) -> bool:
    return limits.features.issuperset(OPS[op].needs) and dtype in shaderlib.types_of(op)


# ---- one matrix ----


def mat_op(limits: Limits, n_rows: int, dtype: str) -> str:
    return _mat_op(limits, row_class(n_rows), dtype)


@cache  # recording a large model calls this 100,000 times
def _mat_op(limits: Limits, rows: str, dtype: str) -> str:
    if limits.batch_invariant and rows == "one":  # one row must not use another op
        rows = "few"
    measured = dict(limits.choices).get(rows, ())
    suited = [op for op in MATRIX_OPS.values() if rows in op.rows and op.suits(limits)]
    if rows == "few" and limits.few_registers:
        # For 8 rows on Mali, mat_wave and mat_dot have 1400 spills and fills, and mat_vec has none
        # (docs/measurements/arm.md).
        suited.sort(key=lambda op: op.grid is rows_by_subgroups)
    if rows == "some" or (rows == "more" and limits.subgroup_size >= 64):
        # For 9 to 16 rows, prefer integer dot products to matrix units. By instruction counts, dot products
        # are 1.2 to 2.6 times as fast (tools/studies/row_choice.py). On matrix units, 16 rows fill at most
        # half of a tile, and converting w to F16 takes longer than multiplying.
        # On AMD's GPUs, whose subgroups have 64 lanes, dot products are up to 1.38 times as fast for up to 32
        # rows.
        suited.sort(key=lambda op: op.x_type != "q8" or "matrix_units" in op.needs)
    return next(op for op in (*measured, *(op.name for op in suited)) if runs(limits, op, dtype))


def operand_type(limits: Limits, n_rows: int, dtype: str) -> str:
    """Return the type of x that `mat` needs: f32, q8 or f16s."""
    return MATRIX_OPS[mat_op(limits, n_rows, dtype)].x_type


# ---- experts ----


def _experts_op(limits: Limits, x_type: str, dtype: str, *, grouped: bool) -> ExpertsOp | None:
    for op in EXPERTS_OPS.values():
        pairs = (EITHER, GROUPED if grouped else SINGLE)
        if op.x_type == x_type and op.pairs in pairs and op.suits(limits) and runs(limits, op.name, dtype):
            return op
    return None


def experts_operand_type(
    limits: Limits, n_rows: int, dtype: str, groups: Groups | None = None, *, whole_rows: bool = True
) -> str:
    """Return the type of x that `mat_id` needs.

    - The type is f16s if a matrix product would use matrix units, the tiles of `groups` fit the units, and
    rows of x are complete. An incomplete row has no scale.
    - Otherwise the type is q8 if the device has q8 ops for experts, and either has fast integer dot products
    or would use q8 for a matrix product.
    - Otherwise the type is f32.
    """
    op = MATRIX_OPS[mat_op(limits, n_rows, dtype)]
    if groups and whole_rows and "matrix_units" in op.needs and groups.tile % limits.matrix_units.n == 0:
        return "f16s"
    able = all(_experts_op(limits, "q8", dtype, grouped=grouped) for grouped in (False, True))
    return "q8" if able and (fast_dots(limits) or op.x_type == "q8") else "f32"


def tile_size(limits: Limits, n_rows: int, n_used: int, n_experts: int) -> int:
    """Return the (row, expert) pairs per tile, or 0 if too few pairs share an expert."""
    n_pairs = n_rows * n_used
    if n_pairs < 2 * n_experts:
        return 0
    if fast_lanes(limits):  # mat_lane_id adds in the same order with and without tiles
        return LANE_TILE
    if limits.batch_invariant and n_rows <= MAX_VEC_ROWS:
        return 0
    if limits.is_cpu:  # on a CPU, barriers take longer than reading an expert's weights again
        return 0
    return 16 if n_pairs < 16 * n_experts else 32


# ---- the ops ----


class ProductOps(Target):
    def mat(
        self, w: View, x: View, y: View, *, bias: View | None = None, y_stride: int | None = None
    ) -> None:
        """Compute y[r, i] = sum over k of w[i, k] * x[r, k], plus bias[i] if given. `x` must have the type
        from `operand_type`."""
        op = mat_op(self.limits, rows_of(x, w.shape[1], x.dtype), w.dtype)
        MATRIX_OPS[op](self, w, x, y, bias=bias, y_stride=y_stride)

    def mat_id(
        self,
        w: View,
        x: View,
        ids: View,
        starts: View,
        y: View,
        *,
        axis: int,
        groups: Groups | None = None,
        first: int = 0,
        count: int | None = None,
    ) -> None:
        """Compute y[r, u] = W_e x for each expert e = ids[r, u]. `x` must have the type from
        `experts_operand_type`."""
        op = _experts_op(self.limits, x.dtype, w.dtype, grouped=groups is not None)
        assert op, (self.limits.features, w, x)
        op(self, w, x, groups or ids, starts, y, axis=axis, first=first, count=count)
