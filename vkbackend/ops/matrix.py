"""Products with one matrix. Each shader has a `MatrixOp`, listed in table.py, all with one signature.

The ops differ in x's type, in the devices and numbers of rows they suit, and in their grid (here or in
units.py).
"""

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

MAX_VEC_ROWS = 8  # maximum rows of x for mat_vec, and for a thread of mat_lane
BUSY_TILES = 64  # workgroups that occupy a GPU: one or two per core
ROW_CLASSES = {
    "one": 1,
    "few": MAX_VEC_ROWS,
    "some": 16,
    "many": 1 << 31,
}  # class -> maximum rows of x
FEW, MANY = ("one", "few"), ("some", "many")


class Size(NamedTuple):
    """A product: w has n rows of k elements, x has n_rows rows."""

    n: int
    k: int
    n_rows: int
    gated: bool = False  # w's rows are gate and up


class Grid(NamedTuple):
    """Specialization constants, and workgroups along the rows of w and of x."""

    consts: dict[str, int]
    along_w: int
    along_x: int = 1


Predicate = Callable[[Limits], bool]


@dataclass(frozen=True)
class MatrixOp:
    """Computes y = w x (+ bias) by the shader `name`; `__call__` records it."""

    name: str
    grid: Callable[[Limits, Size], Grid]
    consts: str  # specialization constants after LOCAL: from the grid, FOURS and WIDE (__call__)
    rows: tuple[str, ...]  # classes of rows of x
    suits: Predicate  # devices that prefer the op to later entries if nothing is measured
    x_type: str = "f32"
    needs: tuple[str, ...] = ()
    gates: Predicate | None = None  # devices that fuse gate, up and glu; None if the shader cannot
    gpus_only: bool = False  # too slow on CPUs to be measured there

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
        """y[r, i] = sum over k of w[i, k] * x[r, k] (+ bias[i]); w [n, k] of a weight type, x [n_rows, k] of
        `x_type`, bias f32 [n].

        Row r of y starts at element r * y_stride (default n), so y may be a part of wider rows. With `up`, y
        is act(w x) * (up x) as in glu, without bias; `up` is a matrix like w, after w in the same buffer, and
        starts at the push constant `up_at`.
        """
        limits, (n, k) = target.limits, w.shape
        n_rows = rows_of(x, k, self.x_type)
        y_stride = n if y_stride is None else y_stride
        assert limits.features.issuperset(self.needs), (self.name, limits.features)
        assert n_rows <= max(ROW_CLASSES[name] for name in self.rows), (self.name, n_rows)
        assert self.x_type != "f16s" or x.offset % 16 == 0, x
        assert bias is None or (bias.shape == (n,) and bias.dtype == "f32"), (w, bias)
        assert y_stride >= n and rows_of(y, 1) >= (n_rows - 1) * y_stride + n, (w, x, y, y_stride)
        # `has_bias` is a push constant: the branch costs nothing next to the product, but another pipeline is
        # slow to compile.
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
        # With WIDE, reads are 16 bytes, so all rows begin at multiples of 16; rows of q8 do so if k is a
        # multiple of 64.
        wide = k % 64 == 0 and not any(view.offset % 16 for view in (w, x, up or w))
        known = {"FOURS": k % 4 == 0, "WIDE": wide}
        consts = consts | {name: int(holds) for name, holds in known.items() if name in self.spec.consts}
        # Adjacent workgroups share rows of w: shaders/lib/product_tile.glsl.
        args, groups = (shown, x, bias or x, y), (*target.fold(along_w * along_x), 1)
        variant = variant_of(self.spec, w.dtype, limits)
        flops = 2 * size.n * k * n_rows
        target.record(self.spec, variant, args, push, consts, groups, flops=flops)


def variant_of(spec: OpSpec, dtype: str, limits: Limits) -> str:
    """Return the shader variant for weights of type `dtype`. Matrix units have a variant per API; int8 needs
    VK_KHR_cooperative_matrix."""
    if "matrix_units" not in spec.needs:
        return dtype
    return f"{dtype}-{'khr' if 'int8_units' in spec.needs else limits.matrix_units.api}"


def row_class(n_rows: int) -> str:
    return next(name for name, most in ROW_CLASSES.items() if n_rows <= most)


# ---- grids ----


def rows_by_threads(limits: Limits, size: Size) -> Grid:
    """TPR threads compute a row of w. On a CPU it is one thread, so no sums are combined (except in a gated
    product); on a GPU each thread has at least 8 elements."""
    alone = limits.is_cpu and not size.gated
    local, tpr = (32, 1) if alone else (128, min(64, max(4, floor_pow2(size.k // 8))))
    return Grid({"LOCAL": local, "TPR": tpr, "N": size.n_rows}, -(-size.n // (local // tpr)))


def rows_by_subgroups(limits: Limits, size: Size) -> Grid:
    local = 128
    per_group = max(2, 2 * local // limits.subgroup_size)
    return Grid({"LOCAL": local, "ROWS": per_group, "N": size.n_rows}, -(-size.n // per_group))


def rows_by_lanes(limits: Limits, size: Size) -> Grid:
    """A thread computes a row of w for up to MAX_VEC_ROWS rows of x, the same number in all threads."""
    local, tiles = 32, -(-size.n_rows // MAX_VEC_ROWS)
    consts = {
        "LOCAL": local,
        "N": -(-size.n_rows // tiles),
        "SUBGROUP": min(limits.subgroup_size, local),
    }
    return Grid(consts, -(-size.n // local), tiles)


def tiles_of_64(limits: Limits, size: Size) -> Grid:
    """A tile is 64 rows of w by 16 or 32 rows of x."""
    rn = 2 if size.n_rows <= 16 else 4
    return Grid({"LOCAL": 128, "RN": rn}, -(-size.n // 64), -(-size.n_rows // (8 * rn)))


def fills(n_rows: int, tile: int) -> bool:
    """Whether n_rows fit one tile, or tiles pad them by at most a quarter: 192 rows in tiles of 128 cost as
    much as 256, a third more than in tiles of 64."""
    return n_rows <= tile or 4 * tile * -(-n_rows // tile) <= 5 * n_rows


def dot_tiles(limits: Limits, size: Size) -> Grid:
    """As `tiles_of_64`, but with 64 rows of x if enough tiles remain to occupy a GPU and subgroups exceed 16
    lanes: narrow subgroups (Intel) have 128 registers per lane and spilled up to 67 registers."""
    grid = tiles_of_64(limits, size)
    enough = size.n_rows > 32 and grid.along_w * -(-size.n_rows // 64) >= BUSY_TILES
    if limits.subgroup_size > 16 and enough and fills(size.n_rows, 64):
        return Grid(grid.consts | {"RN": 8}, grid.along_w, -(-size.n_rows // 64))
    return grid


def tiles_by_size(limits: Limits, size: Size) -> Grid:
    """A workgroup has 16 x 8 threads. Each computes 8 x 8 values if enough tiles remain to occupy a GPU,
    otherwise 4 x 4, or 4 x 2 for up to 16 rows of x."""
    rm, rn = 4, 2 if size.n_rows <= 16 else 4
    enough = size.n_rows > 32 and -(-size.n // 128) * -(-size.n_rows // 64) >= BUSY_TILES
    if enough and fills(size.n_rows, 64):
        rm, rn = 8, 8
    return Grid({"LOCAL": 128, "RM": rm, "RN": rn}, -(-size.n // (16 * rm)), -(-size.n_rows // (8 * rn)))
