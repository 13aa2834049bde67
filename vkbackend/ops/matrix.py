"""Products with one matrix. Each shader has a `MatrixOp` in table.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from vkbackend.buffer import View
from vkbackend.limits import Limits
from vkbackend.ops.elementwise import ACTS
from vkbackend.ops.spec import OpSpec, op_spec
from vkbackend.ops.target import Target, floor_pow2, rows_of

MAX_VEC_ROWS = 8  # Maximum rows of x in mat_vec, and per thread in mat_lane.
BUSY_TILES = 64  # The workgroups that occupy a GPU, one or two per core.
ROW_CLASSES = {
    "one": 1,
    "few": MAX_VEC_ROWS,
    "some": 16,
    "more": 32,
    "many": 1 << 31,
}  # maximum number of rows of x in each class
FEW, MANY = ("one", "few"), ("some", "more", "many")


class Size(NamedTuple):
    """The weight w has n rows of k elements, and x has n_rows rows."""

    n: int
    k: int
    n_rows: int
    gated: bool = False  # w contains the rows of two matrices, gate and up


class Grid(NamedTuple):
    """A dispatch's specialization constants, and its workgroups along the rows of w and of x."""

    consts: dict[str, int]
    along_w: int
    along_x: int = 1


Predicate = Callable[[Limits], bool]


@dataclass(frozen=True)
class MatrixOp:
    """Records the shader `name`, which computes y = w x, plus a bias if given."""

    name: str
    grid: Callable[[Limits, Size], Grid]
    # `grid` returns these constants, which follow LOCAL. `__call__` adds FOURS and WIDE.
    consts: str
    rows: tuple[str, ...]  # Keys of ROW_CLASSES.
    suits: Predicate  # Whether a device without measurements prefers this op to later entries.
    x_type: str = "f32"
    needs: tuple[str, ...] = ()
    gates: Predicate | None = None  # Whether a device fuses gate, up and glu. None: the shader cannot.
    gpus_only: bool = False  # `tune` skips this op on CPUs, where it is slow.

    @cached_property
    def spec(self) -> OpSpec:
        push = "k n n_rows y_stride has_bias" + (" act up_at" if self.gates else "")
        twin = "mat_vec" if self.gates else "mat_mul"
        return op_spec(self.name, "w:r x:r b:r y:w", push, self.consts, needs=self.needs, twin=twin)

    def __call__(
        self,
        target: Target,
        w: View,
        x: View,
        y: View,
        *,
        bias: View | None = None,
        up: View | None = None,
        act: str = "",
        y_stride: int | None = None,
    ) -> None:
        """Shapes: w [n, k] of a weight type, x [n_rows, k] of `x_type`, bias f32 [n].

        Row r of y starts at element r * y_stride. The default stride is n. If the stride is larger, y is a
        slice of wider rows. If `up` is given, y is act(w x) * (up x) without a bias. The matrix `up` has the
        shape and type of w, and follows w in the same buffer.
        """
        limits, (n, k) = target.limits, w.shape
        n_rows = rows_of(x, k, self.x_type)
        y_stride = n if y_stride is None else y_stride
        assert limits.features.issuperset(self.needs), (self.name, limits.features)
        assert n_rows <= max(ROW_CLASSES[name] for name in self.rows), (self.name, n_rows)
        assert self.x_type != "f16s" or x.offset % 16 == 0, x
        assert bias is None or (bias.shape == (n,) and bias.dtype == "f32"), (w, bias)
        assert y_stride >= n and rows_of(y, 1) >= (n_rows - 1) * y_stride + n, (w, x, y, y_stride)
        # `has_bias` is a push constant, because a branch costs little and a specialization constant would
        # need a second pipeline.
        push: dict[str, int | float] = {"k": k, "n": n, "n_rows": n_rows, "y_stride": y_stride}
        push |= {"has_bias": int(bias is not None)}
        if self.gates:
            push |= {"act": 1 + ACTS.index(act) if up else 0, "up_at": 0}
        shown = w
        if up:
            assert self.gates and bias is None, self.name
            assert up.buffer is w.buffer and (up.shape, up.dtype) == (w.shape, w.dtype), up
            push["up_at"], rest = divmod(up.offset - w.offset, 4)
            assert push["up_at"] > 0 and not rest, (w, up)
            shown = View(w.buffer, w.offset, ((up.end - w.offset) // 4,), "u32")
        assert shown.nbytes <= limits.max_storage_range, f"{shown!r} exceeds one binding: split it by rows"
        size = Size(2 * n if up else n, k, n_rows, up is not None)
        consts, along_w, along_x = self.grid(limits, size)
        # If WIDE is set, the shader reads 16 bytes at once, so all rows must begin at multiples of 16 bytes.
        # For q8, k must then be a multiple of 64.
        wide = k % 64 == 0 and not any(view.offset % 16 for view in (w, x, up or w))
        known = {"FOURS": k % 4 == 0, "WIDE": wide}
        consts = consts | {name: int(holds) for name, holds in known.items() if name in self.spec.consts}
        # Adjacent workgroups read the same rows of w (shaders/lib/product_tile.glsl).
        args, groups = (shown, x, bias or x, y), (*target.fold(along_w * along_x), 1)
        variant = variant_of(self.spec, w.dtype, limits)
        flops = 2 * size.n * k * n_rows
        target.record(self.spec, variant, args, push, consts, groups, flops=flops)


def variant_of(spec: OpSpec, dtype: str, limits: Limits) -> str:
    """Shaders for matrix units have variants for khr and nv, but int8 shaders only for khr."""
    if "matrix_units" not in spec.needs:
        return dtype
    return f"{dtype}-{'khr' if 'int8_units' in spec.needs else limits.matrix_units.api}"


def row_class(n_rows: int) -> str:
    return next(name for name, most in ROW_CLASSES.items() if n_rows <= most)


# ---- grids ----


def rows_by_threads(limits: Limits, size: Size) -> Grid:
    """Return a grid in which TPR threads compute a row of w. On a CPU, TPR is 1, so no sums must be combined,
    except for a gated product. On a GPU each thread has 8 elements or more."""
    alone = limits.is_cpu and not size.gated
    local, tpr = (32, 1) if alone else (128, min(64, max(4, floor_pow2(size.k // 8))))
    return Grid({"LOCAL": local, "TPR": tpr, "N": size.n_rows}, -(-size.n // (local // tpr)))


def rows_by_subgroups(limits: Limits, size: Size) -> Grid:
    local = 128
    per_group = max(2, 2 * local // limits.subgroup_size)
    return Grid({"LOCAL": local, "ROWS": per_group, "N": size.n_rows}, -(-size.n // per_group))


def rows_by_lanes(limits: Limits, size: Size) -> Grid:
    """Return a grid in which a thread computes a row of w for up to MAX_VEC_ROWS rows of x. All threads
    compute equally many rows. A workgroup has at least one complete subgroup."""
    local, tiles = max(32, limits.subgroup_size), -(-size.n_rows // MAX_VEC_ROWS)
    consts = {
        "LOCAL": local,
        "N": -(-size.n_rows // tiles),
        # lavapipe shuffles wrong values from lanes 16 on, if it has them (LP_NATIVE_VECTOR_WIDTH above 512).
        "SUBGROUP": min(limits.subgroup_size, 16),
    }
    return Grid(consts, -(-size.n // local), tiles)


def tiles_of_64(limits: Limits, size: Size) -> Grid:
    """Return a grid with tiles of 64 rows of w by 16 or 32 rows of x."""
    rn = 2 if size.n_rows <= 16 else 4
    return Grid({"LOCAL": 128, "RN": rn}, -(-size.n // 64), -(-size.n_rows // (8 * rn)))


def fills(n_rows: int, tile: int) -> bool:
    """Return whether n_rows fit one tile, or grow by at most a quarter if padded to complete tiles."""
    return n_rows <= tile or 4 * tile * -(-n_rows // tile) <= 5 * n_rows


def dot_tiles(limits: Limits, size: Size) -> Grid:
    """Return the grid of `tiles_of_64`. If enough tiles remain to occupy a GPU, return a grid with 64 rows of
    x per tile. With 64 rows, subgroups of 16 lanes or fewer (Intel) spilled up to 67 registers per lane (of
    128)."""
    grid = tiles_of_64(limits, size)
    enough = size.n_rows > 32 and grid.along_w * -(-size.n_rows // 64) >= BUSY_TILES
    if limits.subgroup_size > 16 and enough and fills(size.n_rows, 64):
        return Grid(grid.consts | {"RN": 8}, grid.along_w, -(-size.n_rows // 64))
    return grid


def tiles_by_size(limits: Limits, size: Size) -> Grid:
    """Return a grid of 16 x 8 threads per workgroup. A thread computes 8 x 8 values if enough tiles remain to
    occupy a GPU. Otherwise a thread computes 4 x 4 values, or 4 x 2 for 16 rows of x or fewer."""
    rm, rn = 4, 2 if size.n_rows <= 16 else 4
    enough = size.n_rows > 32 and -(-size.n // 128) * -(-size.n_rows // 64) >= BUSY_TILES
    if enough and fills(size.n_rows, 64):
        rm, rn = 8, 8
    return Grid({"LOCAL": 128, "RM": rm, "RN": rn}, -(-size.n // (16 * rm)), -(-size.n_rows // (8 * rn)))
