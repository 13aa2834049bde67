"""Matrix ops on a stack of experts, of the same contract as ops.py, where callers find them.

w of any weight type holds the experts one behind another, `starts` u32 [n_experts + 1] the prefix sums of
their columns. axis=ROWS (gate, up): w [columns, k], expert e is its rows starts[e]..starts[e + 1]; y
[n_rows, n_used, y_stride], y_stride at least the most columns of an expert, elements beyond e's are not
written. axis=COLUMNS (down): w [n, columns] in bytes, expert e is [n, starts[e + 1] - starts[e]] behind those
before it (whole blocks); y [n_rows, n_used, n], zeros where e has no columns. x is [n_rows, x_stride] for all
used experts, or [n_rows, n_used, x_stride]; ids u32 [n_rows, n_used]. A stack that exceeds one binding comes
in pieces: w then holds experts first..first + count, and pairs of other experts are left to the other pieces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vkbackend.buffer import View
from vkbackend.limits import Limits
from vkbackend.ops.choice import mat_op, operand_type, prefers_dots, prefers_lanes, runs
from vkbackend.ops.half import subgroups, unit_consts
from vkbackend.ops.matrix import (
    MAX_VEC_ROWS,
    Grid,
    Size,
    rows_by_lanes,
    rows_by_subgroups,
    rows_by_threads,
    variant_of,
)
from vkbackend.ops.spec import OPS, fold, record
from vkbackend.recording import Recording

ROWS, COLUMNS = 0, 1  # which side of an expert is its own number of columns: gate and up, or down
LANE_TILE = MAX_VEC_ROWS  # pairs that a thread of mat_lane_id takes


@dataclass(frozen=True, slots=True)
class Groups:
    """The pairs of row and used expert sorted by expert, as moe_group leaves them: order u32 [n_pairs], tiles
    u32 [n_tiles, 3] of at most `tile` pairs each."""

    order: View
    tiles: View
    tile: int


def tile_size(limits: Limits, n_pairs: int, n_experts: int) -> int:
    """Pairs in a tile where they should be grouped by expert; 0 where they are too few to share experts."""
    if n_pairs < 2 * n_experts:
        return 0
    if prefers_lanes(limits):
        return LANE_TILE
    if limits.is_cpu:  # where barriers cost more than reading an expert again
        return 0
    return 16 if n_pairs < 16 * n_experts else 32


def tile_count(n_pairs: int, n_experts: int, tile: int) -> int:
    """The most tiles that can be needed."""
    return n_pairs // tile + min(n_pairs, n_experts)


def moe_group(
    rec: Recording, limits: Limits, ids: View, groups: Groups, *, n_experts: int, label: str = ""
) -> None:
    """Sort the pairs of `ids` u32 [n_rows, n_used] by expert, into the arrays of `groups`."""
    n_pairs, n_tiles = ids.shape[0] * ids.shape[1], groups.tiles.shape[0]
    assert ids.dtype == groups.order.dtype == groups.tiles.dtype == "u32", (ids, groups)
    assert groups.order.shape == (n_pairs,) and groups.tiles.shape == (n_tiles, 3), (ids, groups)
    assert n_tiles >= tile_count(n_pairs, n_experts, groups.tile), (n_tiles, n_pairs, n_experts)
    push: dict[str, int | float] = {"n_pairs": n_pairs, "n_experts": n_experts}
    push |= {"tile": groups.tile, "n_tiles": n_tiles}
    args = ids, groups.order, groups.tiles
    record(rec, "moe_group", "f32", args, push, {"LOCAL": 128}, (1, 1, 1), label=label)


def experts_operand_type(
    limits: Limits, n_rows: int, dtype: str, groups: Groups | None = None, *, whole_rows: bool = True
) -> str:
    """The type in which x goes to experts of type `dtype`: f16s where that many rows go to other matrices on
    matrix units (rows not written whole have no scale), q8 where there are instructions for it or rows go so
    to other matrices, else f32."""
    if groups and whole_rows and mat_op(limits, n_rows, dtype) == "mat_mul_coop":
        if groups.tile % limits.matrix_units.n == 0:
            return "f16s"
    able = all(runs(limits, op, dtype) for op in ("mat_dot_id", "mat_mul_dot_id"))
    return "q8" if able and (prefers_dots(limits) or operand_type(limits, n_rows, dtype) == "q8") else "f32"


@dataclass(frozen=True, slots=True)
class ExpertsOp:
    """y[r, u] = W_e x[r] (or x[r, u]) for e = ids[r, u], by the shader `name`."""

    name: str
    grid: Callable[[Limits, Size], Grid]  # of the most rows and columns of an expert, and the pairs of a tile
    x_type: str = "f32"

    def __call__(
        self,
        rec: Recording,
        limits: Limits,
        w: View,
        x: View,
        pairs: Groups | View,
        starts: View,
        y: View,
        *,
        axis: int,
        first: int = 0,
        count: int | None = None,
        label: str = "",
    ) -> None:
        """`pairs` are the groups, or the ids, as the shader takes them; the rest above."""
        spec = OPS[self.name]
        (n_rows, n_used, y_stride), x_stride, x_per_used = y.shape, x.shape[-1], len(x.shape) == 3
        n_experts = starts.shape[0] - 1
        count = n_experts - first if count is None else count
        side = w.shape[1 - axis]  # the side that is the same for all experts
        assert limits.features.issuperset(spec.needs), (self.name, limits.features)
        assert axis in (ROWS, COLUMNS) and len(w.shape) == 2, (axis, w)
        assert starts.dtype == "u32" and 0 <= first < first + count <= n_experts, (first, count)
        assert x.shape[:-1] == ((n_rows, n_used) if x_per_used else (n_rows,)), (x, y)
        assert x.dtype == self.x_type and y.dtype == "f32", (x, y)
        assert side == (x_stride if axis == ROWS else y_stride), (w, x, y, axis)
        # A row of halves has its scale behind it: zeros of w meet what x has beyond an expert's columns.
        assert x.dtype != "f16s" or axis == ROWS or w.shape[1] == count * x_stride, (w, x, count)
        assert w.nbytes <= limits.max_storage_range, f"{w!r} exceeds one binding: split it by experts"
        which: tuple[View, ...]
        if grouped := isinstance(pairs, Groups):
            which, tile, n_tiles = (pairs.order, pairs.tiles), pairs.tile, pairs.tiles.shape[0]
        else:
            assert pairs.dtype == "u32" and pairs.shape == (n_rows, n_used), (pairs, x)
            which, tile, n_tiles = (pairs,) * (len(spec.args) - 4), 1, n_rows * n_used
        assert n_tiles <= limits.max_groups[2], f"{n_rows} rows of {n_used} exceed the grid"
        grid = self.grid(limits, Size(y_stride, x_stride, tile))
        own = grid.consts | {"AXIS": axis, "GROUPED": int(grouped)}
        push: dict[str, int | float] = {"side": side, "first": first, "count": count}
        push |= {"n_used": n_used, "n_rows": n_rows, "x_stride": x_stride, "y_stride": y_stride}
        record(
            rec,
            self.name,
            variant_of(self.name, w.dtype, limits),
            (w, x, *which, starts, y),
            push | {"x_per_used": int(x_per_used)},
            {name: own[name] for name in spec.consts},
            (*fold(limits, grid.along_w), n_tiles),
            label=label,
            flops=2 * n_rows * n_used * x_stride * y_stride,
        )


def _tiles(limits: Limits, size: Size) -> Grid:
    """64 rows of an expert by the 8, 16, 24 or 32 pairs of a tile."""
    assert size.n_rows in (8, 16, 24, 32), size
    return Grid({"LOCAL": 128, "RN": size.n_rows // 8}, -(-size.n // 64))


def _tiles_of_units(limits: Limits, size: Size) -> Grid:
    """64 rows of an expert by the pairs of a tile, on matrix units."""
    tile = 64, size.n_rows
    return Grid(unit_consts(limits.matrix_units, *tile, *subgroups(limits, *tile)), -(-size.n // tile[0]))


def _rows_by_lanes(limits: Limits, size: Size) -> Grid:
    assert size.n_rows <= LANE_TILE, size
    return rows_by_lanes(limits, size)


# Pair by pair, of the ids:
mat_vec_id = ExpertsOp("mat_vec_id", rows_by_threads)
mat_dot_id = ExpertsOp("mat_dot_id", rows_by_subgroups, "q8")
# Of groups, whose pairs meet their expert together:
mat_mul_id = ExpertsOp("mat_mul_id", _tiles)
mat_mul_dot_id = ExpertsOp("mat_mul_dot_id", _tiles, "q8")
mat_mul_id_coop = ExpertsOp("mat_mul_id_coop", _tiles_of_units, "f16s")
# Of either, where invocations are SIMD lanes (see prefers_lanes):
mat_lane_id = ExpertsOp("mat_lane_id", _rows_by_lanes)
_PAIR_BY_PAIR = {op.x_type: op for op in (mat_vec_id, mat_dot_id)}
_GROUPED = {op.x_type: op for op in (mat_mul_id, mat_mul_dot_id, mat_mul_id_coop)}


def mat_id(
    rec: Recording,
    limits: Limits,
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
    label: str = "",
) -> None:
    """y[r, u] = W_e x for e = ids[r, u], by the fastest op.

    x is of the type that `experts_operand_type` says."""
    op = (_GROUPED if groups else _PAIR_BY_PAIR)[x.dtype]
    if x.dtype == "f32" and prefers_lanes(limits):
        op = mat_lane_id
    op(rec, limits, w, x, groups or ids, starts, y, axis=axis, first=first, count=count, label=label)
