"""Numpy twins of the ops, the oracle of every shader: same name, same argument order, same push constants.

Storage arguments come as arrays in binding order (weights dequantized, or f16 as stored), then StepParams
where the op reads it, then push and specialization constants by keyword (a twin ignores what only tunes).
Outputs are written in place. Sums and products run in float64 and are rounded once, to float32.
One function per op makes the file long.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vkbackend.formats import block_of, dequantize, quantize
from vkbackend.reference_moe import add_id as add_id
from vkbackend.reference_moe import mat_dot_id as mat_dot_id
from vkbackend.reference_moe import mat_lane_id as mat_lane_id
from vkbackend.reference_moe import mat_mul_dot_id as mat_mul_dot_id
from vkbackend.reference_moe import mat_mul_id as mat_mul_id
from vkbackend.reference_moe import mat_mul_id_coop as mat_mul_id_coop
from vkbackend.reference_moe import mat_vec_id as mat_vec_id
from vkbackend.reference_moe import moe_group as moe_group
from vkbackend.reference_moe import moe_logits as moe_logits
from vkbackend.reference_moe import moe_sum as moe_sum
from vkbackend.reference_moe import moe_topk as moe_topk
from vkbackend.reference_quantized import quantize_q8 as quantize_q8
from vkbackend.reference_recurrent import delta_chunk as delta_chunk
from vkbackend.reference_recurrent import delta_gates as delta_gates
from vkbackend.reference_recurrent import delta_net as delta_net
from vkbackend.reference_recurrent import delta_scan as delta_scan
from vkbackend.reference_recurrent import l2_norm as l2_norm
from vkbackend.reference_recurrent import ssm_conv as ssm_conv
from vkbackend.step import StepParams

CELL_BLOCK = 32
NEG_LARGE = -1.0e30
CACHE_TYPE_OF_32 = {64: "bf16", 34: "q8_0", 18: "q4_0"}  # by bytes of 32 elements

Array = np.ndarray


def _f64(array: Array, *shape: int) -> Array:
    """The leading elements of `array` in float64 and in the shape the op means."""
    return array.reshape(-1)[: int(np.prod(shape))].reshape(shape).astype(np.float64)


def _ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


def _cells_of(step: StepParams, row: int, cells: Array, blocks_per_slot: int) -> Array:
    """Cell of each position 0..pos of a row's slot."""
    position, slot = int(step.rows[row, 0]), int(step.rows[row, 1])
    positions = np.arange(position + 1)
    return (
        cells.reshape(-1, blocks_per_slot)[slot, positions // CELL_BLOCK % blocks_per_slot] * CELL_BLOCK
        + positions % CELL_BLOCK
    )


def embed(
    w: Array,
    y: Array,
    step: StepParams,
    *,
    n_embd: int,
    n_vocab: int,
    n_rows: int,
    ids: int,
    first: int = 0,
    **_: Any,
) -> None:
    """y[r] = w[id(r) - first]; the piece with first = 0 writes zeros to rows it has no id of."""
    out = y.reshape(n_rows, n_embd)
    if first == 0:
        out[:] = 0.0
    n_ids = min(step.n_outputs if ids else step.n_rows, n_rows)
    at = (step.outputs[:n_ids] if ids else step.rows[:n_ids, 2]).astype(np.int64) - first
    found = np.flatnonzero((at >= 0) & (at < n_vocab))
    out[found] = w.reshape(n_vocab, n_embd)[at[found]]


def rms_norm(
    x: Array, w: Array, y: Array, *, n: int, n_rows: int, eps: float, has_w: int = 1, **_: Any
) -> None:
    """y = x / sqrt(mean(x^2) + eps) * w."""
    rows = _f64(x, n_rows, n)
    rows = rows / np.sqrt(np.mean(rows * rows, axis=1, keepdims=True) + eps)
    rows = rows * _f64(w, n) if has_w else rows
    if y.dtype == np.uint8:
        quantize_q8(rows.astype(np.float32), y, k=n, n_rows=n_rows)
    else:
        y.reshape(n_rows, n)[:] = rows


def mat_mul(
    w: Array, x: Array, b: Array, y: Array, *, k: int, n: int, n_rows: int, y_stride: int, has_bias: int = 0,
    **_: Any,
) -> None:  # fmt: skip
    """y[r, i] = sum over k of w[i, k] * x[r, k], + b[i] with has_bias; row r of y starts at r * y_stride."""
    with np.errstate(invalid="ignore"):  # NaN of a half
        product = _f64(x, n_rows, k) @ _f64(w, n, k).T
    if has_bias:
        product += _f64(b, n)
    _put_rows(y, product, y_stride)


def mat_vec(
    w: Array, x: Array, b: Array, y: Array, *, k: int, n: int, n_rows: int, y_stride: int, has_bias: int = 0,
    act: int = 0, up_at: int = 0, variant: str = "f32", **_: Any,
) -> None:  # fmt: skip
    """As mat_mul; or act(w x) * (up x), where w is words with one matrix at 0 and the other at up_at."""
    if not act:
        mat_mul(w, x, b, y, k=k, n=n, n_rows=n_rows, y_stride=y_stride, has_bias=has_bias)
        return
    rows = _f64(x, n_rows, k)
    gate, up = (
        rows @ dequantize(w[at:].view(np.uint8), variant, (n, k)).T.astype(float) for at in (0, up_at)
    )
    product = np.empty(gate.shape)
    glu(gate, up, product, n=gate.size, act=act - 1)
    _put_rows(y, product, y_stride)


def _put_rows(y: Array, rows: Array, y_stride: int) -> None:
    flat = y.reshape(-1)
    for r, row in enumerate(rows):
        flat[r * y_stride : r * y_stride + len(row)] = row


mat_lane = mat_wave = mat_dot = mat_vec  # the same products; x of mat_dot comes dequantized
mat_tile = mat_mul_coop = mat_mul_dot = mat_mul_f16 = mat_mul


def pack_f16(x: Array, y: Array, *, k: int, n_rows: int, **_: Any) -> None:
    """Rows of halves of x / s, zeros up to whole 32, then s, the power of two below max |x|: compared bit by
    bit."""
    rows = x.reshape(-1)[: n_rows * k].reshape(n_rows, k)
    top = np.abs(rows).max(axis=1)
    exponent = np.clip(np.where(np.isfinite(top), top, 1).view(np.uint32) >> 23, 1, 253)
    exponent = np.where(np.isfinite(top) & (top > 0), exponent, 127).astype(np.uint32)
    scaled = rows * (254 - exponent << 23).view(np.float32)[:, None]
    out = y.reshape(n_rows, -1)
    out[:] = 0
    with np.errstate(over="ignore"):
        out[:, : 2 * k] = scaled.astype(np.float16).view(np.uint8)
    out[:, -16:-12] = (exponent << 23)[:, None].view(np.uint8)


def _head_norm(heads: Array, w: Array, norm: int, eps: float) -> Array:
    """The heads [..., head_dim], with `norm` divided by their RMS, with 2 also times w."""
    if norm:
        heads = heads / np.sqrt(np.mean(heads * heads, axis=-1, keepdims=True) + eps)
    return heads * _f64(w, heads.shape[-1]) if norm == 2 else heads


def _rotated(heads: Array, cos_sin: Array, n_rot: int, half_split: int) -> Array:
    """heads [n_rows, n_heads, head_dim] with pairs (2i, 2i + 1) rotated, or (i, i + n_rot / 2) with
    half_split."""
    angles = _f64(cos_sin, len(heads), 1, n_rot // 2, 2)
    cos, sin = angles[..., 0], angles[..., 1]
    first = slice(0, n_rot // 2) if half_split else slice(0, n_rot, 2)
    second = slice(n_rot // 2, n_rot) if half_split else slice(1, n_rot, 2)
    out = heads.copy()
    out[..., first] = heads[..., first] * cos - heads[..., second] * sin
    out[..., second] = heads[..., first] * sin + heads[..., second] * cos
    return out


def rope(
    x: Array, w: Array, cos_sin: Array, y: Array, *, n_heads: int, head_dim: int, n_rot: int, n_rows: int,
    eps: float = 0.0, half_split: int = 0, norm: int = 0, **_: Any,
) -> None:  # fmt: skip
    """Norm the heads, rotate their first n_rot dims, copy the others."""
    heads = _head_norm(_f64(x, n_rows, n_heads, head_dim), w, norm, eps)
    y.reshape(heads.shape)[:] = _rotated(heads, cos_sin, n_rot, half_split)


def kv_store(
    x: Array, w: Array, cos_sin: Array, cells: Array, cache: Array, step: StepParams, *, width: int,
    n_rows: int, blocks_per_slot: int, head_dim: int = 0, n_rot: int = 0, half_split: int = 0,
    eps: float = 0.0, norm: int = 0, **_: Any,
) -> None:  # fmt: skip
    """cache[cell of the row's position] = x[row], its heads normed and rotated, in the cache's type, bytes
    where numpy has none."""
    rows = x.reshape(n_rows, width)[: step.n_rows]
    if norm or n_rot:
        heads = _head_norm(_f64(rows, len(rows), width // head_dim, head_dim), w, norm, eps)
        rows = _rotated(heads, cos_sin, n_rot, half_split) if n_rot else heads
        rows = rows.reshape(-1, width).astype(np.float32)
    if cache.dtype == np.uint8:
        out = cache.reshape(-1, cache.shape[-1])
        rows = _stored_blocks(rows, CACHE_TYPE_OF_32[32 * cache.shape[-1] // width])
    else:
        out = cache.reshape(-1, width)
    for row in range(len(rows)):
        with np.errstate(over="ignore"):  # beyond 65,504 f16 is inf, as in the shader
            out[_cells_of(step, row, cells, blocks_per_slot)[-1]] = rows[row]


def _stored_blocks(rows: Array, dtype: str) -> Array:
    """Rows as stored; a quantized block with a value that is not finite is NaN, with the codes of zeros."""
    if block_of(dtype)[0] == 1:
        return quantize(rows, dtype)
    blocks = rows.reshape(-1, 32)
    is_finite = np.isfinite(blocks).all(axis=1, keepdims=True)
    out = quantize(np.where(is_finite, blocks, np.float32(0)), dtype)
    out[~is_finite[:, 0], :2] = np.array([np.nan], np.float16).view(np.uint8)
    return out.reshape(len(rows), -1)


def attn_decode(
    q: Array, k: Array, v: Array, cells: Array, sinks: Array, part: Array, step: StepParams, *, n_heads: int,
    n_kv: int, group: int, q_first: int, n_rows: int, blocks_per_slot: int, n_splits: int, window: int,
    scale: float, softcap: float, head_k: int, head_v: int, final: int = 0, has_sinks: int = 0, **_: Any,
) -> None:  # fmt: skip
    """part = (sum of p * v, max, sum of p) over each split's blocks of keys, p = exp(score - max); with
    `final` they are joined."""
    queries = _f64(q, n_rows, n_heads, head_k)
    out = np.zeros((n_rows, n_heads, n_splits, head_v + 2))
    out[..., head_v] = NEG_LARGE
    for row in range(min(n_rows, step.n_rows)):
        at = _cells_of(step, row, cells, blocks_per_slot)
        first = _first_key(len(at), window)
        start = first // CELL_BLOCK * CELL_BLOCK
        per_split = _ceil_div(_ceil_div(len(at) - start, CELL_BLOCK), n_splits) * CELL_BLOCK
        for split in range(n_splits):
            begin = start + split * per_split
            own = at[max(begin, first) : begin + per_split]
            if len(own):
                score, values = _scores(queries[row], k, v, own, n_kv, group, q_first, scale, softcap)
                top = score.max(axis=1, keepdims=True)
                prob = np.exp(score - top)
                out[row, :, split, :head_v] = np.einsum("hj,jhd->hd", prob, values)
                out[row, :, split, head_v] = top[:, 0]
                out[row, :, split, head_v + 1] = prob.sum(axis=1)
    if final:
        shape = {"n_heads": n_heads, "n_rows": n_rows, "n_splits": n_splits, "head_v": head_v}
        attn_combine(out, sinks, part, **shape, has_sinks=has_sinks)
    else:
        part.reshape(out.shape)[:] = out


def attn_combine(
    part: Array, sinks: Array, y: Array, *, n_heads: int, n_rows: int, n_splits: int, head_v: int,
    has_sinks: int = 0, **_: Any,
) -> None:  # fmt: skip
    """y = sum of exp(m_s - m) * acc_s / (sum of exp(m_s - m) * l_s + exp(sink - m)), zeros for no keys."""
    parts = _f64(part, n_rows, n_heads, n_splits, head_v + 2)
    top = parts[..., head_v].max(axis=2, keepdims=True)
    if has_sinks:
        top = np.maximum(top, _f64(sinks, 1, n_heads, 1))
    factor = np.exp(parts[..., head_v] - top)[..., None]
    total = (factor * parts[..., head_v + 1 :]).sum(axis=2)
    if has_sinks:
        total += np.exp(_f64(sinks, 1, n_heads, 1) - top)
    acc = (factor * parts[..., :head_v]).sum(axis=2)
    y.reshape(n_rows, n_heads, head_v)[:] = np.divide(acc, total, out=np.zeros_like(acc), where=total > 0)


def attn_prefill(
    q: Array, k: Array, v: Array, cells: Array, sinks: Array, y: Array, step: StepParams, *, n_heads: int,
    n_kv: int, group: int, q_first: int, n_rows: int, blocks_per_slot: int, window: int, scale: float,
    softcap: float, head_k: int, head_v: int, has_sinks: int = 0, **_: Any,
) -> None:  # fmt: skip
    """y = softmax(scores, sink) v over the window up to each row's position; zeros for rows of no run."""
    queries = _f64(q, n_rows, n_heads, head_k)
    out = np.zeros((n_rows, n_heads, head_v))
    for row in range(min(n_rows, step.n_rows)):
        at = _cells_of(step, row, cells, blocks_per_slot)
        at = at[_first_key(len(at), window) :]
        score, values = _scores(queries[row], k, v, at, n_kv, group, q_first, scale, softcap)
        logits = np.c_[score, _f64(sinks, n_heads)] if has_sinks else score
        prob = np.exp(score - logits.max(axis=1, keepdims=True))
        total = np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)
        out[row] = np.einsum("hj,jhd->hd", prob / total, values)
    y.reshape(out.shape)[:] = out


def _first_key(n_keys: int, window: int) -> int:
    """The first of `n_keys` positions that the last one sees."""
    return max(0, n_keys - window) if window else 0


def _scores(
    query: Array, k: Array, v: Array, at: Array, n_kv: int, group: int, q_first: int, scale: float,
    softcap: float,
) -> tuple[Array, Array]:  # fmt: skip
    """(scores [n_heads, n_keys], values [n_keys, n_heads, head_v]) of one row's query over the cells `at`."""
    kv_head = (q_first + np.arange(len(query))) // group

    def heads(cache: Array) -> Array:
        return cache.reshape(cache.shape[0], n_kv, -1)[at].astype(np.float64)[:, kv_head]

    score = scale * np.einsum("hd,jhd->hj", query, heads(k))
    return softcap * np.tanh(score / softcap) if softcap else score, heads(v)


def glu(gate: Array, up: Array, y: Array, *, n: int, act: int = 1, **_: Any) -> None:
    """y = act(gate) * up: identity, SiLU, GELU (tanh form), sigmoid, or the clamped SwiGLU of gpt-oss."""
    g, u = _f64(gate, n), _f64(up, n)

    def sigmoid(x: Array) -> Array:
        return 1.0 / (1.0 + np.exp(np.minimum(-x, 700.0)))

    capped = np.minimum(g, 7.0)
    product = [
        lambda: g * u,
        lambda: g * sigmoid(g) * u,
        lambda: 0.5 * g * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (g + 0.044715 * g**3))) * u,
        lambda: sigmoid(g) * u,
        lambda: capped * sigmoid(1.702 * capped) * (np.clip(u, -7.0, 7.0) + 1.0),
    ]
    y.reshape(-1)[:n] = product[act]()


def scale(x: Array, y: Array, *, n: int, c: float, **_: Any) -> None:
    """y = c * x, in float32: the product of two floats has one rounding; 0 gives zeros, of NaN too."""
    y.reshape(-1)[:n] = np.float32(c) * x.reshape(-1)[:n] if c else 0.0


def softcap(x: Array, y: Array, *, n: int, c: float, **_: Any) -> None:
    """y = c * tanh(x / c)."""
    y.reshape(-1)[:n] = c * np.tanh(_f64(x, n) / c)


def add(a: Array, b: Array, y: Array, *, n: int, **_: Any) -> None:
    """y = a + b."""
    y.reshape(-1)[:n] = _f64(a, n) + _f64(b, n)


def add_bias(x: Array, b: Array, y: Array, *, n: int, n_rows: int, **_: Any) -> None:
    """y = x + b in every row."""
    y.reshape(-1)[: n_rows * n] = (_f64(x, n_rows, n) + _f64(b, n)).reshape(-1)


def gate_rows(gate: Array, x: Array, y: Array, *, n: int, n_rows: int, **_: Any) -> None:
    """y[r] = sigmoid(gate[r]) * x[r]."""
    factor = 1 / (1 + np.exp(-_f64(gate, n_rows, 1)))
    y.reshape(-1)[: n_rows * n] = (factor * _f64(x, n_rows, n)).reshape(-1)


def columns(x: Array, y: Array, *, n: int, width: int, first: int, n_rows: int, **_: Any) -> None:
    """y = columns first..first + n of rows of `width`."""
    rows = x.reshape(-1)[: n_rows * width].reshape(n_rows, width)
    y.reshape(-1)[: n_rows * n] = rows[:, first : first + n].reshape(-1)


def _bf16_bits(values: Array) -> Array:
    """uint16 bits of float32 values as the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def _bf16_values(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def pack_bf16(x: Array, y: Array, *, n: int, **_: Any) -> None:
    """y = x as bfloat16 pairs in words, a last half of zero where n is odd."""
    halves = y.reshape(-1).view(np.uint16)
    halves[:n] = _bf16_bits(x.reshape(-1)[:n])
    halves[n:] = 0


def add_partials(
    residual: Array, own: Array, slots: Array, w: Array, h: Array, y: Array, *, n: int, n_rows: int,
    n_slots: int, own_index: int, slot_stride: int, writers: int, eps: float, has_residual: int = 1,
    has_norm: int = 1, wire: int = 0, **_: Any,
) -> None:  # fmt: skip
    """h = residual + sum of the writers' partials in slot order, in float32: h is compared bit by bit."""
    total = np.zeros(n_rows * n, np.float32)
    for s in range(n_slots):
        if writers >> s & 1:
            slot = slots.reshape(-1)[s * slot_stride :][:slot_stride]
            if s == own_index:
                partial = own.reshape(-1)[: n_rows * n]
                partial = _bf16_values(_bf16_bits(partial)) if wire else partial
            else:
                partial = _bf16_values(slot.view(np.uint16)) if wire else slot.view(np.float32)
            total = total + partial[: n_rows * n]
    if has_residual:
        total = residual.reshape(-1)[: n_rows * n] + total
    h.reshape(-1)[: n_rows * n] = total
    if has_norm:
        rms_norm(total, w, y, n=n, n_rows=n_rows, eps=eps)


def copy_words(src: Array, dst: Array, *, n: int, **_: Any) -> None:
    """dst = src, n 32-bit words."""
    dst.reshape(-1).view(np.uint32)[:n] = src.reshape(-1).view(np.uint32)[:n]


def top_k(
    x: Array, source: Array, ids: Array, values: Array, *, n: int, n_rows: int, chunk: int, n_chunks: int,
    k: int = 64, mapped: int = 0, **_: Any,
) -> None:  # fmt: skip
    """The k largest of each chunk, descending, the lower place first on ties, NaN before all."""
    rows = np.asarray(x, np.float32).reshape(-1)[: n_rows * n].reshape(n_rows, n)
    places, found = ids.reshape(-1), values.reshape(-1)
    for r in range(n_rows):
        for c in range(n_chunks):
            part = rows[r, c * chunk : (c + 1) * chunk]
            ranks = np.where(np.isnan(part), np.inf, part).astype(np.float64)
            order = np.lexsort((np.arange(len(part)), -ranks, ~np.isnan(part)))[:k]
            at = (r * n_chunks + c) * k
            places[at : at + k], found[at : at + k] = 0xFFFFFFFF, -np.inf
            chosen = order + c * chunk
            places[at : at + len(order)] = source.reshape(-1)[r * n + chosen] if mapped else chosen
            found[at : at + len(order)] = part[order]


# ---- heads of latent attention ----


def mat_heads(w: Array, x: Array, y: Array, *, k: int, n: int, n_heads: int, n_rows: int, **_: Any) -> None:
    """y[r, h, i] = sum over k of w[h, i, k] * x[r, h, k]."""
    product = np.einsum("hik,rhk->rhi", _f64(w, n_heads, n, k), _f64(x, n_rows, n_heads, k))
    y.reshape(-1)[: product.size] = product.reshape(-1)


def concat(a: Array, b: Array, y: Array, *, n_a: int, n_b: int, n_rows: int, **_: Any) -> None:
    """y[row] = a[row], then b[row]."""
    both = [x.reshape(-1)[: n_rows * n].reshape(n_rows, n) for x, n in ((a, n_a), (b, n_b))]
    y.reshape(-1)[: n_rows * (n_a + n_b)] = np.concatenate(both, axis=1).reshape(-1)
