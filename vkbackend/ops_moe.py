"""The ops of a mixture of experts, of the same contract as ops.py, where callers find them.

The order is moe_logits and moe_topk on the residual, mat_vec_id with gate and up, glu, mat_vec_id with
down, moe_sum. A device holds some columns of every expert's feed-forward network, of each as many as its
plan says: `starts` u32 [n_experts + 1] are the prefix sums of those counts.
"""

from __future__ import annotations

import math

from vkbackend.buffer import View
from vkbackend.limits import Limits
from vkbackend.opspec import floor_pow2, fold, record, rows_of
from vkbackend.recording import Recording

ROWS, COLUMNS = 0, 1  # which side of an expert is its own number of columns: gate and up, or down
MAX_EXPERTS, MAX_USED = 1024, 32  # what moe_topk has shared memory for
LOGITS_LOCAL = 32  # part of the order of summation, so never chosen by device


def moe_logits(
    rec: Recording, limits: Limits, h: View, w_norm: View, w: View, logits: View, *, label: str = ""
) -> None:
    """logits[r, e] = sum over k of h[r, k] * (w_norm[k] * w[e, k]), the same bits on every device and driver.

    h [n_rows, n_embd] is the residual before its norm, whose weight is w_norm [n_embd]; w f32
    [n_experts, n_embd]; logits [n_rows, n_experts] are too large by rms(h), which changes no order.
    """
    n_experts, n_embd = w.shape
    n_rows = rows_of(h, n_embd)
    assert w.dtype == "f32" and w_norm.shape == (n_embd,) and w_norm.dtype == "f32", (w, w_norm)
    assert w.nbytes <= limits.max_storage_range and rows_of(logits, n_experts) == n_rows, (w, logits)
    n = 1 if n_rows == 1 else 4  # rows per workgroup; not part of the order
    record(
        rec,
        "moe_logits",
        "f32",
        (h, w_norm, w, logits),
        {"n_embd": n_embd, "n_experts": n_experts, "n_rows": n_rows},
        {"LOCAL": LOGITS_LOCAL, "N": n},
        (*fold(limits, n_experts), -(-n_rows // n)),
        label=label,
        flops=3 * n_rows * n_experts * n_embd,
    )


def moe_topk(
    rec: Recording,
    limits: Limits,
    logits: View,
    h: View,
    ids: View,
    weights: View,
    *,
    eps: float,
    scale: float = 1.0,
    norm_w: bool = False,
    label: str = "",
) -> None:
    """ids u32 [n_rows, n_used]: the experts of the largest logits, descending, ties by lower id, NaN last.

    weights f32 [n_rows, n_used]: the softmax over all experts of logits / sqrt(mean(h^2) + eps) at ids,
    with norm_w divided by max(their sum, 2^-14), times scale. logits [n_rows, n_experts] from moe_logits,
    h [n_rows, n_embd] the residual they are of.
    """
    n_rows, n_used = ids.shape
    n_embd, n_experts = h.shape[-1], logits.shape[-1]
    assert ids.dtype == "u32" and rows_of(weights, n_used) == n_rows, (ids, weights)
    assert rows_of(h, n_embd) == n_rows and rows_of(logits, n_experts) == n_rows, (h, logits, ids)
    assert 1 <= n_used <= min(n_experts, MAX_USED) and n_experts <= MAX_EXPERTS, (n_used, n_experts)
    record(
        rec,
        "moe_topk",
        "f32",
        (logits, h, ids, weights),
        {
            "n_embd": n_embd,
            "n_experts": n_experts,
            "n_used": n_used,
            "n_rows": n_rows,
            "eps": eps,
            "scale": scale,
            "norm_w": int(norm_w),
        },
        {"LOCAL": 32 if limits.is_cpu or n_experts <= 32 else 128},
        (*fold(limits, n_rows), 1),
        label=label,
        flops=n_rows * (2 * n_embd + n_experts * n_experts),
    )


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
    """y[r, u] = W_e x for e = ids[r, u]; w of any weight type holds the experts one behind another.

    axis=ROWS: w [columns, k], expert e is its rows starts[e]..starts[e + 1]; y [n_rows, n_used, y_stride],
    y_stride at least the most columns of an expert, elements beyond e's are not written. axis=COLUMNS:
    w [n, columns] in bytes, expert e is [n, starts[e + 1] - starts[e]] behind those before it (whole blocks);
    y [n_rows, n_used, n], zeros where e has no columns. x is [n_rows, x_stride] for all used experts, or
    [n_rows, n_used, x_stride]; ids u32 [n_rows, n_used]. A stack that exceeds one binding comes in pieces:
    w then holds experts first..first + count, and pairs of other experts are left to the other pieces.
    """
    n_rows, n_used = ids.shape
    n_experts = starts.shape[0] - 1
    count = n_experts - first if count is None else count
    x_stride, y_stride = x.shape[-1], y.shape[-1]
    x_per_used = len(x.shape) == 3
    assert axis in (ROWS, COLUMNS) and len(w.shape) == 2, (axis, w)
    side = w.shape[1 - axis]  # the side that is the same for all experts
    assert ids.dtype == starts.dtype == "u32" and 0 <= first < first + count <= n_experts, (first, count)
    assert x.shape[:-1] == ((n_rows, n_used) if x_per_used else (n_rows,)) and x.dtype == "f32", (x, ids)
    assert y.shape[:-1] == (n_rows, n_used) and y.dtype == "f32", (y, ids)
    assert side == (x_stride if axis == ROWS else y_stride), (w, x, y, axis)
    assert w.nbytes <= limits.max_storage_range, f"{w!r} exceeds one binding: split it by experts"
    assert n_rows * n_used <= limits.max_groups[2], f"{n_rows} rows of {n_used} exceed the grid"
    if limits.is_cpu:  # as mat_vec
        local, tpr = 32, 1
    else:
        local, tpr = 128, min(64, max(4, floor_pow2(x_stride // 8)))
    record(
        rec,
        "mat_vec_id",
        w.dtype,
        (w, x, ids, starts, y),
        {
            "side": side,
            "first": first,
            "count": count,
            "n_used": n_used,
            "n_rows": n_rows,
            "x_stride": x_stride,
            "y_stride": y_stride,
            "x_per_used": int(x_per_used),
        },
        {"LOCAL": local, "TPR": tpr, "AXIS": axis},
        (*fold(limits, -(-y_stride // (local // tpr))), n_rows * n_used),
        label=label,
        flops=2 * n_rows * n_used * x_stride * y_stride,
    )


def moe_sum(rec: Recording, limits: Limits, x: View, weights: View, y: View, *, label: str = "") -> None:
    """y[r] = sum over u, in order, of weights[r, u] * x[r, u]; x [n_rows, n_used, n], y [n_rows, n]."""
    n_rows, n_used, n = x.shape
    assert rows_of(weights, n_used) == rows_of(y, n) == n_rows and x.dtype == "f32", (x, weights, y)
    record(
        rec,
        "moe_sum",
        "f32",
        (x, weights, y),
        {"n": n, "n_used": n_used, "n_rows": n_rows},
        {"LOCAL": 128},
        (*fold(limits, -(-n // 128)), n_rows),
        label=label,
        flops=2 * math.prod(x.shape),
    )
