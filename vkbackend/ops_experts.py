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

from dataclasses import dataclass
from typing import Any

from vkbackend.buffer import View
from vkbackend.limits import Limits
from vkbackend.matrix_choice import mat_op, operand_type, prefers_dots, runs
from vkbackend.ops_half import subgroups, unit_consts
from vkbackend.opspec import OPS, floor_pow2, fold, prefers_lanes, record
from vkbackend.recording import Recording

ROWS, COLUMNS = 0, 1  # which side of an expert is its own number of columns: gate and up, or down
LANE_TILE = 8  # pairs that a thread of mat_lane_id takes


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
    **where: Any,
) -> None:
    """y[r, u] = W_e x for e = ids[r, u], by the fastest op; `where` is first, count, label.

    x is of the type that `experts_operand_type` says."""
    if x.dtype == "f16s" and groups:
        mat_mul_id_coop(rec, limits, w, x, groups, starts, y, axis=axis, **where)
    elif x.dtype == "q8" and groups:
        mat_mul_dot_id(rec, limits, w, x, groups, starts, y, axis=axis, **where)
    elif x.dtype == "q8":
        mat_dot_id(rec, limits, w, x, ids, starts, y, axis=axis, **where)
    elif prefers_lanes(limits):
        mat_lane_id(rec, limits, w, x, groups or ids, starts, y, axis=axis, **where)
    elif groups:
        mat_mul_id(rec, limits, w, x, groups, starts, y, axis=axis, **where)
    else:
        mat_vec_id(rec, limits, w, x, ids, starts, y, axis=axis, **where)


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


def mat_vec_id(
    rec: Recording,
    limits: Limits,
    w: View,
    x: View,
    ids: View,
    starts: View,
    y: View,
    *,
    axis: int,
    first: int = 0,
    count: int | None = None,
    label: str = "",
) -> None:
    """y[r, u] = W_e x for e = ids[r, u], a workgroup for each pair."""
    assert ids.dtype == "u32" and ids.shape == (x.shape[0], y.shape[1]), (x, ids)
    push, flops = _push(limits, w, x, starts, y, axis, first, count)
    x_stride, y_stride = x.shape[-1], y.shape[-1]
    if limits.is_cpu:  # as mat_vec
        local, tpr = 32, 1
    else:
        local, tpr = 128, min(64, max(4, floor_pow2(x_stride // 8)))
    groups = (*fold(limits, -(-y_stride // (local // tpr))), ids.shape[0] * ids.shape[1])
    consts = {"LOCAL": local, "TPR": tpr, "AXIS": axis}
    args = w, x, ids, starts, y
    record(rec, "mat_vec_id", w.dtype, args, push, consts, groups, label=label, flops=flops)


def mat_mul_id(
    rec: Recording,
    limits: Limits,
    w: View,
    x: View,
    groups: Groups,
    starts: View,
    y: View,
    *,
    axis: int,
    first: int = 0,
    count: int | None = None,
    label: str = "",
) -> None:
    """The same for pairs in tiles of 16, 24 or 32, which meet their expert together."""
    push, flops = _push(limits, w, x, starts, y, axis, first, count)
    assert groups.tile in (16, 24, 32), groups
    consts = {"LOCAL": 128, "RN": groups.tile // 8, "AXIS": axis}
    grid = (*fold(limits, -(-y.shape[-1] // 64)), groups.tiles.shape[0])
    args = w, x, groups.order, groups.tiles, starts, y
    record(rec, "mat_mul_id", w.dtype, args, push, consts, grid, label=label, flops=flops)


def mat_lane_id(
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
    """The same where invocations are SIMD lanes (see prefers_lanes); `pairs` are groups, or the ids."""
    assert limits.features.issuperset(OPS["mat_lane_id"].needs), limits.features
    push, flops = _push(limits, w, x, starts, y, axis, first, count)
    grouped = isinstance(pairs, Groups)
    if isinstance(pairs, Groups):
        order, tiles, n, n_tiles = pairs.order, pairs.tiles, pairs.tile, pairs.tiles.shape[0]
    else:
        assert pairs.dtype == "u32" and pairs.shape == (x.shape[0], y.shape[1]), (x, pairs)
        order, tiles, n, n_tiles = pairs, pairs, 1, pairs.shape[0] * pairs.shape[1]
    assert n <= LANE_TILE, pairs
    local = 32
    consts = {"LOCAL": local, "N": n, "SUBGROUP": min(limits.subgroup_size, local)}
    consts |= {"AXIS": axis, "GROUPED": int(grouped)}
    grid = (*fold(limits, -(-y.shape[-1] // local)), n_tiles)
    args = w, x, order, tiles, starts, y
    record(rec, "mat_lane_id", w.dtype, args, push, consts, grid, label=label, flops=flops)


def mat_dot_id(
    rec: Recording,
    limits: Limits,
    w: View,
    x: View,
    ids: View,
    starts: View,
    y: View,
    *,
    axis: int,
    first: int = 0,
    count: int | None = None,
    label: str = "",
) -> None:
    """As mat_vec_id for x of type q8."""
    assert limits.features.issuperset(OPS["mat_dot_id"].needs), limits.features
    assert ids.dtype == "u32" and ids.shape == (x.shape[0], y.shape[1]), (x, ids)
    push, flops = _push(limits, w, x, starts, y, axis, first, count, "q8")
    local = 128
    per_group = max(2, 2 * local // limits.subgroup_size)
    groups = (*fold(limits, -(-y.shape[-1] // per_group)), ids.shape[0] * ids.shape[1])
    consts = {"LOCAL": local, "ROWS": per_group, "AXIS": axis}
    args = w, x, ids, starts, y
    record(rec, "mat_dot_id", w.dtype, args, push, consts, groups, label=label, flops=flops)


def mat_mul_dot_id(
    rec: Recording,
    limits: Limits,
    w: View,
    x: View,
    groups: Groups,
    starts: View,
    y: View,
    *,
    axis: int,
    first: int = 0,
    count: int | None = None,
    label: str = "",
) -> None:
    """As mat_mul_id for x of type q8; tiles may be of 8 pairs, too."""
    assert limits.features.issuperset(OPS["mat_mul_dot_id"].needs), limits.features
    push, flops = _push(limits, w, x, starts, y, axis, first, count, "q8")
    assert groups.tile in (8, 16, 24, 32), groups
    consts = {"LOCAL": 128, "RN": groups.tile // 8, "AXIS": axis}
    grid = (*fold(limits, -(-y.shape[-1] // 64)), groups.tiles.shape[0])
    args = w, x, groups.order, groups.tiles, starts, y
    record(rec, "mat_mul_dot_id", w.dtype, args, push, consts, grid, label=label, flops=flops)


def mat_mul_id_coop(
    rec: Recording,
    limits: Limits,
    w: View,
    x: View,
    groups: Groups,
    starts: View,
    y: View,
    *,
    axis: int,
    first: int = 0,
    count: int | None = None,
    label: str = "",
) -> None:
    """As mat_mul_id for x f16s, on matrix units, in tiles of 64 rows of an expert. With axis=COLUMNS every
    expert has as many columns as a row of x."""
    assert limits.features.issuperset(OPS["mat_mul_id_coop"].needs), limits.features
    push, flops = _push(limits, w, x, starts, y, axis, first, count, x_type="f16s")
    assert axis == ROWS or w.shape[1] == push["count"] * push["x_stride"], (w, x, push)
    units, tile_m = limits.matrix_units, 64
    consts = unit_consts(units, tile_m, groups.tile, *subgroups(limits, tile_m, groups.tile))
    grid = (*fold(limits, -(-y.shape[-1] // tile_m)), groups.tiles.shape[0])
    args, variant = (w, x, groups.order, groups.tiles, starts, y), f"{w.dtype}-{units.api}"
    consts |= {"AXIS": axis}
    record(rec, "mat_mul_id_coop", variant, args, push, consts, grid, label=label, flops=flops)


def _push(
    limits: Limits,
    w: View,
    x: View,
    starts: View,
    y: View,
    axis: int,
    first: int,
    count: int | None,
    x_type: str = "f32",
) -> tuple[dict[str, int | float], int]:
    n_rows, n_used, y_stride = y.shape
    x_stride, x_per_used = x.shape[-1], len(x.shape) == 3
    n_experts = starts.shape[0] - 1
    count = n_experts - first if count is None else count
    assert axis in (ROWS, COLUMNS) and len(w.shape) == 2, (axis, w)
    side = w.shape[1 - axis]  # the side that is the same for all experts
    assert starts.dtype == "u32" and 0 <= first < first + count <= n_experts, (first, count)
    assert x.shape[:-1] == ((n_rows, n_used) if x_per_used else (n_rows,)) and x.dtype == x_type, (x, y)
    assert y.dtype == "f32" and side == (x_stride if axis == ROWS else y_stride), (w, x, y, axis)
    assert w.nbytes <= limits.max_storage_range, f"{w!r} exceeds one binding: split it by experts"
    assert n_rows * n_used <= limits.max_groups[2], f"{n_rows} rows of {n_used} exceed the grid"
    push: dict[str, int | float] = {"side": side, "first": first, "count": count}
    push |= {"n_used": n_used, "n_rows": n_rows, "x_stride": x_stride, "y_stride": y_stride}
    return push | {"x_per_used": int(x_per_used)}, 2 * n_rows * n_used * x_stride * y_stride
