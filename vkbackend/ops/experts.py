"""Products with a stack of experts. Each shader has an `ExpertsOp`, listed in table.py.

w, of any weight type, holds the experts in order. A device has some FFN columns of each expert; `starts` u32
[n_experts + 1] are the prefix sums of these column counts.

axis=ROWS (gate, up): w is [columns, k]; expert e is rows starts[e]..starts[e + 1]. y is [n_rows, n_used,
y_stride], with y_stride at least the columns of the widest expert; elements past e's columns are not written.

axis=COLUMNS (down): w has the bytes of [n, columns]. Expert e is a matrix [n, starts[e + 1] - starts[e]]
after the earlier experts, with complete blocks in each row. y is [n_rows, n_used, n], with zeros if e has no
columns.

x is [n_rows, x_stride] or [n_rows, n_used, x_stride]; ids is u32 [n_rows, n_used]. A stack larger than one
binding comes in pieces: w has experts first..first + count, and pairs of other experts are skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from vkbackend.buffer import View
from vkbackend.limits import Limits
from vkbackend.ops.matrix import MAX_VEC_ROWS, Grid, Predicate, Size, rows_by_lanes, variant_of
from vkbackend.ops.spec import OpSpec, op_spec
from vkbackend.ops.target import Target
from vkbackend.ops.units import subgroups, unit_consts

ROWS, COLUMNS = 0, 1
LANE_TILE = MAX_VEC_ROWS  # pairs per thread of mat_lane_id

# Order of the pairs (row, used expert): as in ids, grouped by expert, or either.
SINGLE, GROUPED, EITHER = "single", "grouped", "either"


@dataclass(frozen=True, slots=True)
class Groups:
    """The pairs (row, used expert), sorted by expert (moe_group): order u32 [n_pairs], and tiles u32
    [n_tiles, 3] of at most `tile` pairs."""

    order: View
    tiles: View
    tile: int


def tile_count(n_pairs: int, n_experts: int, tile: int) -> int:
    return n_pairs // tile + min(n_pairs, n_experts)


@dataclass(frozen=True)
class ExpertsOp:
    """Computes y[r, u] = W_e x[r] (or x[r, u]) for e = ids[r, u] by the shader `name`.

    Shaders with EITHER have the constant GROUPED; without groups, their bindings `order` and `tiles` are the
    ids.
    """

    name: str
    grid: Callable[[Limits, Size], Grid]  # for the largest expert and the pairs of a tile
    consts: str  # constants between LOCAL and AXIS, named as in the grid
    pairs: str  # SINGLE, GROUPED or EITHER
    suits: Predicate  # devices that prefer the op to later entries
    x_type: str = "f32"
    needs: tuple[str, ...] = ()

    @cached_property
    def spec(self) -> OpSpec:
        args, consts, twin = {
            SINGLE: ("ids:r", "AXIS", "mat_vec_id"),
            GROUPED: ("order:r tiles:r", "AXIS", "mat_mul_id"),
            EITHER: ("order:r tiles:r", "AXIS GROUPED", "mat_lane_id"),
        }[self.pairs]
        push = "side first count n_used n_rows x_stride y_stride x_per_used"
        return op_spec(
            self.name,
            f"w:r x:r {args} starts:r y:w",
            push,
            f"{self.consts} {consts}",
            needs=self.needs,
            twin=twin,
        )

    def __call__(
        self,
        target: Target,
        w: View,
        x: View,
        pairs: Groups | View,
        starts: View,
        y: View,
        *,
        axis: int,
        first: int = 0,
        count: int | None = None,
    ) -> None:
        """`pairs`: groups or ids, as the shader takes them."""
        spec, limits = self.spec, target.limits
        (n_rows, n_used, y_stride), x_stride, x_per_used = y.shape, x.shape[-1], len(x.shape) == 3
        n_experts = starts.shape[0] - 1
        count = n_experts - first if count is None else count
        side = w.shape[1 - axis]  # the same for all experts
        assert limits.features.issuperset(self.needs), (self.name, limits.features)
        assert axis in (ROWS, COLUMNS) and len(w.shape) == 2, (axis, w)
        assert starts.dtype == "u32" and 0 <= first < first + count <= n_experts, (first, count)
        assert x.shape[:-1] == ((n_rows, n_used) if x_per_used else (n_rows,)), (x, y)
        assert x.dtype == self.x_type and y.dtype == "f32", (x, y)
        assert side == (x_stride if axis == ROWS else y_stride), (w, x, y, axis)
        # Rows of f16s end with their scale. x past an expert's columns is multiplied by zeros of w.
        assert x.dtype != "f16s" or x.offset % 16 == 0, x
        assert x.dtype != "f16s" or axis == ROWS or w.shape[1] == count * x_stride, (w, x, count)
        assert w.nbytes <= limits.max_storage_range, f"{w!r} exceeds one binding: split it by experts"
        which: tuple[View, ...]
        if grouped := isinstance(pairs, Groups):
            which, tile, n_tiles = (pairs.order, pairs.tiles), pairs.tile, pairs.tiles.shape[0]
        else:
            assert pairs.dtype == "u32" and pairs.shape == (n_rows, n_used), (pairs, x)
            which, tile, n_tiles = (pairs,) if self.pairs == SINGLE else (pairs, pairs), 1, n_rows * n_used
        assert n_tiles <= limits.max_groups[2], f"{n_rows} rows of {n_used} exceed the grid"
        grid = self.grid(limits, Size(y_stride, x_stride, tile))
        values = grid.consts | {"AXIS": axis, "GROUPED": int(grouped)}
        push: dict[str, int | float] = {"side": side, "first": first, "count": count}
        push |= {"n_used": n_used, "n_rows": n_rows, "x_stride": x_stride, "y_stride": y_stride}
        target.record(
            spec,
            variant_of(spec, w.dtype, limits),
            (w, x, *which, starts, y),
            push | {"x_per_used": int(x_per_used)},
            {name: values[name] for name in spec.consts},
            (*target.fold(grid.along_w), n_tiles),
            flops=2 * n_rows * n_used * x_stride * y_stride,
        )


# ---- grids ----


def tiles_of_pairs(limits: Limits, size: Size) -> Grid:
    """A tile is 64 rows of an expert by 8, 16, 24 or 32 pairs."""
    assert size.n_rows in (8, 16, 24, 32), size
    return Grid({"LOCAL": 128, "RN": size.n_rows // 8}, -(-size.n // 64))


def pairs_by_units(limits: Limits, size: Size) -> Grid:
    """As `tiles_of_pairs`, on matrix units."""
    tile = 64, size.n_rows
    return Grid(unit_consts(limits.matrix_units, *tile, *subgroups(limits, *tile)), -(-size.n // tile[0]))


def pairs_by_lanes(limits: Limits, size: Size) -> Grid:
    """A thread computes one row of an expert for all pairs of a tile."""
    assert size.n_rows <= LANE_TILE, size
    return rows_by_lanes(limits, size)
