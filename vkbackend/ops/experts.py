"""Products with a stack of experts. Each shader has an `ExpertsOp` in table.py.

The weight `w` contains the experts in order, in any weight type. Each expert's FFN columns are divided over
the devices. `starts` u32 [n_experts + 1] holds the prefix sums of this device's columns per expert.

If axis=ROWS (gate, up), w is [columns, k], and expert e is rows starts[e]..starts[e + 1]. The result y is
[n_rows, n_used, y_stride], where y_stride is at least the columns of the widest expert. Elements past the
columns of e are not written.

If axis=COLUMNS (down), w consists of consecutive matrices [n, starts[e + 1] - starts[e]], whose rows are
complete blocks. The result y is [n_rows, n_used, n], with zeros if expert e has no columns.

`x` is [n_rows, x_stride] or [n_rows, n_used, x_stride]. `ids` is u32 [n_rows, n_used]. If a stack exceeds one
storage binding, each dispatch computes only the pairs of experts first..first + count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from vkbackend import env
from vkbackend.buffer import View
from vkbackend.limits import Limits
from vkbackend.ops.matrix import MAX_VEC_ROWS, Grid, Predicate, Size, rows_by_lanes, variant_of
from vkbackend.ops.spec import OpSpec, op_spec
from vkbackend.ops.target import Target
from vkbackend.ops.units import subgroups, unit_consts

ROWS, COLUMNS = 0, 1
LANE_TILE = MAX_VEC_ROWS  # (row, expert) pairs per thread of mat_lane_id

# How a shader reads (row, expert) pairs: in the order of ids, grouped by expert, or in either order.
SINGLE, GROUPED, EITHER = "single", "grouped", "either"


@dataclass(frozen=True, slots=True)
class Groups:
    """(row, expert) pairs that moe_group sorted by expert. `order` u32 [n_pairs] lists the pairs, and `tiles`
    u32 [n_tiles, 3] describes tiles of at most `tile` pairs."""

    order: View
    tiles: View
    tile: int


def tile_count(n_pairs: int, n_experts: int, tile: int) -> int:
    return n_pairs // tile + min(n_pairs, n_experts)


@dataclass(frozen=True)
class ExpertsOp:
    """Records the shader `name`, which computes y[r, u] = W_e x[r] or W_e x[r, u] for e = ids[r, u].

    An EITHER shader has the specialization constant GROUPED. If GROUPED is 0, the bindings `order` and
    `tiles` are both the ids.
    """

    name: str
    # Returns the grid for the widest expert and the pairs of a tile.
    grid: Callable[[Limits, Size], Grid]
    consts: str  # Names of the grid's constants, in order.
    pairs: str  # SINGLE, GROUPED or EITHER.
    suits: Predicate  # Whether a device prefers this op to later entries.
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
        """Record the product. `pairs` are the Groups or ids that the shader reads."""
        spec, limits = self.spec, target.limits
        (n_rows, n_used, y_stride), x_stride, x_per_used = y.shape, x.shape[-1], len(x.shape) == 3
        n_experts = starts.shape[0] - 1
        count = n_experts - first if count is None else count
        side = w.shape[1 - axis]  # the dimension that all experts share
        assert limits.features.issuperset(self.needs), (self.name, limits.features)
        assert axis in (ROWS, COLUMNS) and len(w.shape) == 2, (axis, w)
        assert starts.dtype == "u32" and 0 <= first < first + count <= n_experts, (first, count)
        assert x.shape[:-1] == ((n_rows, n_used) if x_per_used else (n_rows,)), (x, y)
        assert x.dtype == self.x_type and y.dtype == "f32", (x, y)
        assert side == (x_stride if axis == ROWS else y_stride), (w, x, y, axis)
        # A row of f16s ends with its scale. Elements of x past an expert's columns are multiplied by zeros.
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
            flops=2 * min(n_rows * n_used, n_tiles * tile) * x_stride * y_stride,
            # Dispatches for other experts write other rows of y, so they may run together. The validation
            # layer sees only that the ranges overlap.
            apart=0 if env.validation() else y.buffer.uid,
        )


# ---- grids ----


def tiles_of_pairs(limits: Limits, size: Size) -> Grid:
    """Return a grid with tiles of 64 rows of an expert by 8, 16, 24 or 32 pairs."""
    assert size.n_rows in (8, 16, 24, 32), size
    return Grid({"LOCAL": 128, "RN": size.n_rows // 8}, -(-size.n // 64))


def pairs_by_units(limits: Limits, size: Size) -> Grid:
    """Return a grid with tiles of 64 rows of an expert on matrix units."""
    tile = 64, size.n_rows
    return Grid(unit_consts(limits.matrix_units, *tile, *subgroups(limits, *tile)), -(-size.n // tile[0]))


def pairs_by_lanes(limits: Limits, size: Size) -> Grid:
    """Return a grid in which a thread computes one row of an expert for all pairs of a tile."""
    assert size.n_rows <= LANE_TILE, size
    return rows_by_lanes(limits, size)
