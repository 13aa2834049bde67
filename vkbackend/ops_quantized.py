"""Products of 8-bit activations, of the same contract as ops.py, where callers find them.

`quantize_q8` makes rows of type q8 (32 codes, a scale and sums: shaders/lib/q8.glsl) of f32 ones, once for
all the matrices that read them. Products are dot products of integers, with weights whose codes fit in int8.
"""

from __future__ import annotations

from vkbackend.buffer import View
from vkbackend.limits import Limits
from vkbackend.ops_matrix import MAX_VEC_ROWS, gated_args, mat_args
from vkbackend.opspec import OPS, fold, record, rows_of
from vkbackend.recording import Recording


def quantize_q8(rec: Recording, limits: Limits, x: View, y: View, *, label: str = "") -> None:
    """y q8 [..., k] = x f32 of as many elements: |x - y| is at most half of the largest |x| of 32 / 127.

    32 elements with NaN or inf among them become NaN, in whatever is multiplied with them."""
    k = y.shape[-1]
    n_rows = rows_of(y, k, "q8")
    assert k % 32 == 0 and rows_of(x, k) == n_rows, (x, y)
    local = 128
    groups = (*fold(limits, -(-n_rows * k // (4 * local))), 1)
    push: dict[str, int | float] = {"k": k, "n_rows": n_rows}
    record(
        rec, "quantize_q8", "f32", (x, y), push, {"LOCAL": local}, groups, label=label, flops=2 * n_rows * k
    )


def mat_dot(
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
    """w [n, k] times 1..8 rows x q8 [n_rows, k]; the rest as mat_vec."""
    assert limits.features.issuperset(OPS["mat_dot"].needs), limits.features
    args, push, n_rows, n_slots = gated_args(limits, w, up, act, x, bias, y, y_stride, "q8")
    assert 1 <= n_rows <= MAX_VEC_ROWS, f"mat_dot serves 1..{MAX_VEC_ROWS} rows, got {n_rows}"
    k = w.shape[1]
    local = 128
    per_group = max(2, 2 * local // limits.subgroup_size)
    consts = {"LOCAL": local, "ROWS": per_group, "N": n_rows}
    groups = (*fold(limits, -(-n_slots // per_group)), 1)
    record(rec, "mat_dot", w.dtype, args, push, consts, groups, label=label, flops=2 * n_slots * k * n_rows)


def mat_mul_dot(
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
    """As mat_dot for any number of rows, in tiles of 64 rows of w by 16 or 32 rows of x."""
    assert limits.features.issuperset(OPS["mat_mul_dot"].needs), limits.features
    args, push, n_rows = mat_args(limits, w, x, bias, y, y_stride, "q8")
    n, k = w.shape
    rn = 2 if n_rows <= 16 else 4
    groups = (*fold(limits, -(-n // 64)), -(-n_rows // (8 * rn)))
    consts = {"LOCAL": 128, "RN": rn}
    flops = 2 * n * k * n_rows
    record(rec, "mat_mul_dot", w.dtype, args, push, consts, groups, label=label, flops=flops)
