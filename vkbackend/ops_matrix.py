"""Products with one matrix, of the same contract as ops.py, where callers find them: one shader each.

Which of them suits a device and the rows of x: matrix_choice.py. For activations of 8 bits: ops_quantized.py.
"""

from __future__ import annotations

from vkbackend.buffer import View
from vkbackend.limits import Limits
from vkbackend.ops_elementwise import ACTS
from vkbackend.opspec import OPS, floor_pow2, fold, record, rows_of
from vkbackend.recording import Recording

MAX_VEC_ROWS = 8  # rows of x up to which mat_vec serves, and that a thread of mat_lane takes
BUSY_TILES = 64  # workgroups that keep a GPU busy: one or two for each of its cores


def mat_vec(
    rec: Recording,
    limits: Limits,
    w: View,
    x: View,
    y: View,
    *,
    bias: View | None = None,
    up: View | None = None,
    act: str = "",
    y_stride: int | None = None,
    label: str = "",
) -> None:
    """w [n, k] of any weight type times 1..8 rows x [n_rows, k].

    Row r of y starts at element r * y_stride (default n), so a slice of a wider row can be written. bias f32
    [n] is added to every row. With `up`, a matrix like w and behind it in the same buffer, y is
    act(w x) * (up x) as glu makes it, and there is no bias.
    """
    args, push, n_rows, n_slots = gated_args(limits, w, up, act, x, bias, y, y_stride)
    assert 1 <= n_rows <= MAX_VEC_ROWS, f"mat_vec serves 1..{MAX_VEC_ROWS} rows, got {n_rows}"
    k = w.shape[1]
    if limits.is_cpu and not up:  # an invocation is a SIMD lane: with a row each, nothing has to meet
        local, tpr = 32, 1
    else:  # at least two rounds of 4 elements for each thread of a row
        local, tpr = 128, min(64, max(4, floor_pow2(k // 8)))
    consts = {"LOCAL": local, "TPR": tpr, "N": n_rows}
    groups = (*fold(limits, -(-n_slots // (local // tpr))), 1)
    record(rec, "mat_vec", w.dtype, args, push, consts, groups, label=label, flops=2 * n_slots * k * n_rows)


def mat_mul(
    rec: Recording,
    limits: Limits,
    w: View,
    x: View,
    y: View,
    *,
    bias: View | None = None,
    y_stride: int | None = None,
    label: str = "",
) -> None:
    """As mat_vec for any number of rows, in tiles of 64 rows of w by 16 or 32 rows of x."""
    args, push, n_rows = mat_args(limits, w, x, bias, y, y_stride)
    n, k = w.shape
    rn = 2 if n_rows <= 16 else 4
    groups = (*fold(limits, -(-n // 64)), -(-n_rows // (8 * rn)))
    consts = {"LOCAL": 128, "RN": rn}
    record(rec, "mat_mul", w.dtype, args, push, consts, groups, label=label, flops=2 * n * k * n_rows)


def mat_wave(
    rec: Recording,
    limits: Limits,
    w: View,
    x: View,
    y: View,
    *,
    bias: View | None = None,
    up: View | None = None,
    act: str = "",
    y_stride: int | None = None,
    label: str = "",
) -> None:
    """As mat_vec, where threads of a subgroup can add up among themselves."""
    assert limits.features.issuperset(OPS["mat_wave"].needs), limits.features
    args, push, n_rows, n_slots = gated_args(limits, w, up, act, x, bias, y, y_stride)
    assert 1 <= n_rows <= MAX_VEC_ROWS, f"mat_wave serves 1..{MAX_VEC_ROWS} rows, got {n_rows}"
    k = w.shape[1]
    local = 128
    per_group = max(2, 2 * local // limits.subgroup_size)
    consts = {"LOCAL": local, "ROWS": per_group, "N": n_rows}
    groups = (*fold(limits, -(-n_slots // per_group)), 1)
    record(rec, "mat_wave", w.dtype, args, push, consts, groups, label=label, flops=2 * n_slots * k * n_rows)


def mat_lane(
    rec: Recording,
    limits: Limits,
    w: View,
    x: View,
    y: View,
    *,
    bias: View | None = None,
    up: View | None = None,
    act: str = "",
    y_stride: int | None = None,
    label: str = "",
) -> None:
    """As mat_vec for any number of rows, on devices whose invocations are SIMD lanes (see prefers_lanes)."""
    assert limits.features.issuperset(OPS["mat_lane"].needs), limits.features
    args, push, n_rows, n_slots = gated_args(limits, w, up, act, x, bias, y, y_stride)
    k = w.shape[1]
    local, per_thread = 32, min(n_rows, MAX_VEC_ROWS)
    groups = (*fold(limits, -(-n_slots // local)), -(-n_rows // per_thread))
    consts = {"LOCAL": local, "N": per_thread, "SUBGROUP": min(limits.subgroup_size, local)}
    record(rec, "mat_lane", w.dtype, args, push, consts, groups, label=label, flops=2 * n_slots * k * n_rows)


def mat_tile(
    rec: Recording,
    limits: Limits,
    w: View,
    x: View,
    y: View,
    *,
    bias: View | None = None,
    y_stride: int | None = None,
    label: str = "",
) -> None:
    """As mat_mul, in tiles of 64 or 128 rows of w by 16, 32 or 64 rows of x."""
    args, push, n_rows = mat_args(limits, w, x, bias, y, y_stride)
    n, k = w.shape
    rm, rn = tile_of(n, n_rows)
    groups = (*fold(limits, -(-n // (16 * rm))), -(-n_rows // (8 * rn)))
    consts = {"LOCAL": 128, "RM": rm, "RN": rn}
    record(rec, "mat_tile", w.dtype, args, push, consts, groups, label=label, flops=2 * n * k * n_rows)


def tile_of(n: int, n_rows: int) -> tuple[int, int]:
    """Rows of w and of x for each of 16 x 8 threads: 8 x 8 where enough such tiles are left to occupy a GPU,
    else 4 by no more than the rows of x need."""
    if n_rows > 32 and -(-n // 128) * -(-n_rows // 64) >= BUSY_TILES:
        return 8, 8
    return 4, 2 if n_rows <= 16 else 4


def mat_args(
    limits: Limits, w: View, x: View, bias: View | None, y: View, y_stride: int | None, x_type: str = "f32"
) -> tuple[tuple[View, ...], dict[str, int | float], int]:
    """(args, push constants, rows of x). Whether there is a bias is a push constant: the branch costs nothing
    beside the product, and another pipeline takes long to compile."""
    n, k = w.shape
    n_rows = rows_of(x, k, x_type)
    y_stride = n if y_stride is None else y_stride
    assert w.nbytes <= limits.max_storage_range, f"{w!r} exceeds one binding: split it by rows"
    assert bias is None or (bias.shape == (n,) and bias.dtype == "f32"), (w, bias)
    assert y_stride >= n and rows_of(y, 1) >= (n_rows - 1) * y_stride + n, (
        w.shape,
        x.shape,
        y.shape,
        y_stride,
    )
    push: dict[str, int | float] = {"k": k, "n": n, "n_rows": n_rows, "y_stride": y_stride}
    return (w, x, bias or x, y), push | {"has_bias": int(bias is not None)}, n_rows


def gated_args(
    limits: Limits,
    w: View,
    up: View | None,
    act: str,
    x: View,
    bias: View | None,
    y: View,
    y_stride: int | None,
    x_type: str = "f32",
) -> tuple[tuple[View, ...], dict[str, int | float], int, int]:
    """mat_args, and how many rows the matrices have; with `up` w is all from the one to the end of the other,
    so that one binding shows both."""
    args, push, n_rows = mat_args(limits, w, x, bias, y, y_stride, x_type)
    if not up:
        return args, push | {"act": 0, "up_at": 0}, n_rows, w.shape[0]
    assert bias is None and up.buffer is w.buffer and (up.shape, up.dtype) == (w.shape, w.dtype), (w, up)
    up_at, rest = divmod(up.offset - w.offset, 4)
    assert up_at > 0 and not rest and up.end - w.offset <= limits.max_storage_range, (w, up)
    both = View(w.buffer, w.offset, ((up.end - w.offset) // 4,), "u32")
    push |= {"act": 1 + ACTS.index(act), "up_at": up_at}
    return (both, *args[1:]), push, n_rows, 2 * w.shape[0]
