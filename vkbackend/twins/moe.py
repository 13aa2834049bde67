"""Twins of the ops for a mixture of experts. Routing computes in float32 in the shaders' order, so the bits
are identical."""

from __future__ import annotations

from typing import Any

import numpy as np

from vkbackend.twins.arrays import Array, f64

SOFTMAX, SIGMOID, SOFTMAX_WEIGHT, SPARSE_MIXER, ROOT_SOFTPLUS = range(5)
GIVEN = 2  # has_select: `select` has the experts of each row
LANES = 128
F32 = np.float32


def _f32(x: Array, *shape: int) -> Array:
    return x.reshape(-1)[: int(np.prod(shape))].reshape(shape)


# ---- shaders/lib/exact.glsl ----


def exact_reciprocal(x: Array) -> Array:
    y = (np.uint32(0x7EF311C3) - x.view(np.uint32)).view(F32)
    for _ in range(4):
        y = y * (-x * y + F32(2))
    return y


def exact_inverse_sqrt(x: Array) -> Array:
    y = (np.uint32(0x5F375A86) - (x.view(np.uint32) >> 1)).view(F32)
    for _ in range(4):
        y = y * (F32(-0.5) * (x * y) * y + F32(1.5))
    return y


def exact_exp(x: Array) -> Array:
    x = np.clip(x, F32(-87), F32(88))
    n = np.floor(x * F32(1.4426950408889634) + F32(0.5))
    f = n * F32(2.12194440e-4) + (n * F32(-0.693359375) + x)
    total = np.full_like(x, 1 / 5040)
    for c in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1, 1):
        total = total * f + F32(c)
    bits = (np.nan_to_num(n).astype(np.int32) + 127).astype(np.uint32) << 23
    return total * bits.view(F32)


def exact_sigmoid(x: Array) -> Array:
    y = exact_reciprocal(exact_exp(np.minimum(-x, F32(80))) + F32(1))
    return np.where(np.isnan(x), x, y)


def exact_root_softplus(x: Array) -> Array:
    t = exact_exp(np.where(x > 0, -x, x))
    s = t * exact_reciprocal(t + F32(2))
    square, total = s * s, np.full_like(s, 1 / 17)
    for n in (15, 13, 11, 9, 7, 5, 3, 1):
        total = total * square + F32(1 / n)
    y = np.maximum(x, F32(0)) + F32(2) * s * total
    return np.where(np.isnan(x), x, y * exact_inverse_sqrt(np.where(np.isnan(y), F32(1), y)))


def exact_sum(x: Array) -> Array:
    """Lane i % 128 adds element i. Then the upper half of the lanes is added to the lower half, until one
    lane remains."""
    lanes = np.zeros((*x.shape[:-1], LANES), F32)
    for i in range(0, x.shape[-1], LANES):
        part = x[..., i : i + LANES]
        lanes[..., : part.shape[-1]] += part
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


# ---- router ----


def moe_logits(
    h: Array, w_norm: Array, w: Array, logits: Array, *, n_embd: int, n_experts: int, n_rows: int, **_: Any
) -> None:
    """Lane k % 32 adds product k, in ascending order of k. The lanes are added as in `exact_sum`."""
    n_lanes = 32
    weight = w_norm.reshape(-1)[:n_embd] * w.reshape(-1)[: n_experts * n_embd].reshape(n_experts, n_embd)
    rows = h.reshape(-1)[: n_rows * n_embd].reshape(n_rows, 1, n_embd)
    lanes = np.zeros((n_rows, n_experts, n_lanes), np.float32)
    for k in range(0, n_embd, n_lanes):
        product = rows[..., k : k + n_lanes] * weight[:, k : k + n_lanes]
        lanes[..., : product.shape[-1]] += product
    while n_lanes > 1:
        n_lanes //= 2
        lanes = lanes[..., :n_lanes] + lanes[..., n_lanes:]
    logits.reshape(-1)[: n_rows * n_experts] = lanes.reshape(-1)


@np.errstate(invalid="ignore", over="ignore")
def moe_topk(
    logits: Array, h: Array, bias: Array, select: Array, gain: Array, ids: Array, weights: Array, *,
    n_embd: int, n_experts: int, n_used: int, n_rows: int, n_groups: int, n_groups_used: int, norm_w: int,
    per_id: int, eps: float, scale: float, logit_scale: float, softcap: float, gating: int = SOFTMAX,
    has_bias: int = 0, has_select: int = 0, has_gain: int = 0, **_: Any,
) -> None:  # fmt: skip
    rows, raw = _f32(h, n_rows, n_embd), _f32(logits, n_rows, n_experts)
    mean = exact_sum(rows * rows) * exact_reciprocal(np.array([n_embd], F32)) + F32(eps)
    factor = np.ones(n_rows, F32) if eps < 0 else exact_inverse_sqrt(mean)
    norm = (factor * F32(logit_scale))[:, None]
    value = raw * norm
    decides = raw
    if has_bias:
        decides = value = value + _f32(bias, n_experts)
    if softcap:
        inverse = exact_reciprocal(np.array([softcap], F32))
        capped = F32(softcap) * (F32(2) * exact_sigmoid(value * inverse * F32(2)) + F32(-1))
        value = np.where(np.isnan(value), value, capped)
    if gating == SOFTMAX:
        top = np.nanmax(np.where(np.isnan(value), -np.inf, value), axis=1, keepdims=True)
        value = exact_exp(value - np.where(np.isnan(value).all(axis=1, keepdims=True), F32(np.nan), top))
        total = exact_sum(value)
        value = value * np.where(np.isnan(total), total, exact_reciprocal(total))[:, None]
    elif gating == SIGMOID:
        value = exact_sigmoid(value)
    elif gating == ROOT_SOFTPLUS:
        value = exact_root_softplus(value)
    if has_select == 1 or n_groups > 1:
        decides = value + _f32(select, n_experts) if has_select else value
    # NaN is sorted after numbers. Experts of groups that are not used are sorted after NaN.
    order = np.stack([np.isnan(decides), np.where(np.isnan(decides), 0, -decides)]).astype(np.float64)
    if n_groups > 1:
        size = n_experts // n_groups
        best = -np.sort(-decides.reshape(n_rows, n_groups, size), axis=2)
        score = best[..., 0] + best[..., 1]
        place = np.argsort(np.argsort(-score, axis=1, kind="stable"), axis=1)
        order[0] += 2 * np.repeat(place >= n_groups_used, size, axis=1)
    chosen = np.stack([np.lexsort((order[1, r], order[0, r]))[:n_used] for r in range(n_rows)])
    if has_select == GIVEN:
        chosen = np.minimum(_f32(select, n_rows, n_used).astype(np.int64), n_experts - 1)
    prob = np.take_along_axis(value, chosen, 1)
    if gating == SOFTMAX_WEIGHT:
        prob = exact_exp(prob - prob.max(axis=1, keepdims=True))
    if gating == SPARSE_MIXER:
        prob = _mixed_sparsely(value, chosen)
    elif gating == SOFTMAX_WEIGHT or norm_w:
        total = np.zeros(n_rows, F32)
        for u in range(n_used):
            total = total + prob[:, u]
        kept = np.maximum(total, F32(2.0**-14))
        prob = prob * np.where(np.isnan(total), total, exact_reciprocal(kept))[:, None]
    prob = prob * F32(scale)
    if has_gain:
        prob = prob * _f32(gain, n_experts)[chosen]
    ids.reshape(-1)[: n_rows * n_used] = chosen.reshape(-1) // per_id
    weights.reshape(-1)[: n_rows * n_used] = prob.reshape(-1)


def _mixed_sparsely(logits: Array, chosen: Array) -> Array:
    """Return the weights [n_rows, n_used] of a sparse mixer."""
    weights, left = np.empty(chosen.shape, F32), np.ones(logits.shape, bool)
    for u in range(chosen.shape[1]):
        own = np.take_along_axis(logits, chosen[:, u : u + 1], 1)
        far = own - logits > np.fmax(np.abs(logits), own) * F32(0.02)
        near = np.where(left & ~far, exact_exp(logits - own), F32(0))
        total = np.zeros(len(logits), F32)
        for e in range(logits.shape[1]):
            total = total + near[:, e]
        weights[:, u] = np.where(np.isnan(total), total, exact_reciprocal(total))
        np.put_along_axis(left, chosen[:, u : u + 1], False, 1)
    return weights


# ---- experts ----


def mat_vec_id(
    w: Array, x: Array, ids: Array, starts: Array, y: Array, *, side: int, first: int, count: int,
    n_used: int, n_rows: int, x_stride: int, y_stride: int, x_per_used: int, axis: int = 0, **_: Any,
) -> None:  # fmt: skip
    """An expert's matrix is [columns, side] for axis 0 and [side, columns] for axis 1."""
    for pair in range(n_rows * n_used):
        expert = int(ids.reshape(-1)[pair])
        if first <= expert < first + count:
            begin, end = int(starts[expert]), int(starts[expert + 1])
            n, k = (side, end - begin) if axis else (end - begin, side)
            matrix = f64(w.reshape(-1)[side * (begin - int(starts[first])) :], n, k)
            vector = f64(x.reshape(-1)[(pair if x_per_used else pair // n_used) * x_stride :], k)
            y.reshape(-1)[pair * y_stride :][:n] = matrix @ vector


def mat_lane_id(
    w: Array, x: Array, order: Array, tiles: Array, starts: Array, y: Array, *, side: int, first: int,
    count: int, n_used: int, n_rows: int, x_stride: int, y_stride: int, x_per_used: int, axis: int = 0,
    grouped: int = 1, **_: Any,
) -> None:  # fmt: skip
    """If grouped is 0, `tiles` holds the expert ids."""
    ids = tiles.reshape(-1)
    if grouped:
        ids = np.full(n_rows * n_used, 0xFFFFFFFF, np.uint32)
        for expert, begin, n_pairs in tiles.reshape(-1, 3):
            ids[order.reshape(-1)[begin : begin + n_pairs]] = expert
    mat_vec_id(
        w, x, ids, starts, y, side=side, first=first, count=count, n_used=n_used, n_rows=n_rows,
        x_stride=x_stride, y_stride=y_stride, x_per_used=x_per_used, axis=axis,
    )  # fmt: skip


def mat_mul_id(
    w: Array, x: Array, order: Array, tiles: Array, starts: Array, y: Array, *, side: int, first: int,
    count: int, n_used: int, n_rows: int, x_stride: int, y_stride: int, x_per_used: int, axis: int = 0,
    **_: Any,
) -> None:  # fmt: skip
    mat_lane_id(
        w, x, order, tiles, starts, y, side=side, first=first, count=count, n_used=n_used, n_rows=n_rows,
        x_stride=x_stride, y_stride=y_stride, x_per_used=x_per_used, axis=axis,
    )  # fmt: skip


def moe_group(
    ids: Array, order: Array, tiles: Array, *, n_pairs: int, n_experts: int, tile: int, n_tiles: int, **_: Any
) -> None:
    """The sort is stable. A tile is (expert, first position in `order`, number of pairs). Unused tiles are
    zeros."""
    expert_of = ids.reshape(-1)[:n_pairs]
    pairs_of = [np.flatnonzero(expert_of == e) for e in range(n_experts)]
    together = np.concatenate(pairs_of)
    order.reshape(-1)[: len(together)] = together
    rows, begin = tiles.reshape(-1, 3), 0
    rows[:n_tiles] = 0
    t = 0
    for e, pairs in enumerate(pairs_of):
        for i in range(0, len(pairs), tile):
            rows[t] = e, begin + i, min(tile, len(pairs) - i)
            t += 1
        begin += len(pairs)


def add_id(
    x: Array,
    b: Array,
    ids: Array,
    starts: Array,
    y: Array,
    *,
    n: int,
    n_pairs: int,
    ragged: int = 0,
    **_: Any,
) -> None:
    for pair in range(n_pairs):
        e = int(ids.reshape(-1)[pair])
        begin, end = (int(starts[e]), int(starts[e + 1])) if ragged else (e * n, (e + 1) * n)
        biased = f64(x.reshape(-1)[pair * n :], end - begin) + f64(b.reshape(-1)[begin:], end - begin)
        y.reshape(-1)[pair * n :][: end - begin] = biased


def moe_sum(x: Array, weights: Array, y: Array, *, n: int, n_used: int, n_rows: int, **_: Any) -> None:
    total = np.einsum("ru,run->rn", f64(weights, n_rows, n_used), f64(x, n_rows, n_used, n))
    y.reshape(-1)[: n_rows * n] = total.reshape(-1)
