from __future__ import annotations

from typing import Any

import numpy as np

from vkbackend.formats import block_of, quantize
from vkbackend.ops.attention_tiles import CELL_BLOCK
from vkbackend.ops.kv_cache import CACHE_TYPES
from vkbackend.step import StepParams
from vkbackend.twins.arrays import Array, ceil_div, f64

NEG_LARGE = -1.0e30


def cells_of(
    step: StepParams, row: int, cells: Array, blocks_per_slot: int, end: int = 0, block_size: int = 1,
    cells_per_block: int = CELL_BLOCK,
) -> Array:  # fmt: skip
    """Return the cells of positions 0 to `end` - 1, by default up to the row's own position. With a
    `block_size`, return the cells of complete blocks."""
    position, slot = int(step.rows[row, 0]), int(step.rows[row, 1])
    positions = np.arange(end or position + 1)[block_size - 1 :: block_size]
    blocks = cells.reshape(-1, blocks_per_slot)[slot, positions // CELL_BLOCK % blocks_per_slot]
    return blocks * cells_per_block + positions % CELL_BLOCK // block_size


def own_cells(
    step: StepParams, n_rows: int, cells: Array, blocks_per_slot: int, block_size: int, cells_per_block: int
) -> Array:
    """Return the cell of each row's own position, or of the block of `block_size` positions that ends
    there."""
    positions, slots = step.rows[:n_rows, 0].astype(np.int64), step.rows[:n_rows, 1]
    blocks = cells.reshape(-1, blocks_per_slot)[slots, positions // CELL_BLOCK % blocks_per_slot]
    return blocks.astype(np.int64) * cells_per_block + positions % CELL_BLOCK // block_size


def _head_norm(heads: Array, w: Array, norm: int, eps: float) -> Array:
    """Return heads [..., head_dim] unchanged (`norm` 0), divided by the RMS (1), or divided by the RMS and
    multiplied by w (2)."""
    if norm:
        heads = heads / np.sqrt(np.mean(heads * heads, axis=-1, keepdims=True) + eps)
    return heads * f64(w, heads.shape[-1]) if norm == 2 else heads


def _rotated(heads: Array, cos_sin: Array, n_rot: int, half_split: int, parts: int = 1) -> Array:
    """Rotate each of the `parts` of the first n_rot dimensions separately."""
    if parts > 1:
        cut, pairs = n_rot // parts, n_rot // 2 // parts
        table, out = cos_sin.reshape(len(heads), n_rot // 2, 2), heads.copy()
        for p in range(parts):
            at, turned = slice(p * cut, p * cut + cut), table[:, p * pairs : (p + 1) * pairs]
            out[..., at] = _rotated(heads[..., at], np.ascontiguousarray(turned), cut, half_split)
        return out
    angles = f64(cos_sin, len(heads), 1, n_rot // 2, 2)
    cos, sin = angles[..., 0], angles[..., 1]
    first = slice(0, n_rot // 2) if half_split else slice(0, n_rot, 2)
    second = slice(n_rot // 2, n_rot) if half_split else slice(1, n_rot, 2)
    out = heads.copy()
    out[..., first] = heads[..., first] * cos - heads[..., second] * sin
    out[..., second] = heads[..., first] * sin + heads[..., second] * cos
    return out


def rope(
    x: Array, w: Array, cos_sin: Array, y: Array, *, n_heads: int, head_dim: int, n_rot: int, n_rows: int,
    eps: float = 0.0, half_split: int = 0, norm: int = 0, parts: int = 1, **_: Any,
) -> None:  # fmt: skip
    heads = _head_norm(f64(x, n_rows, n_heads, head_dim), w, norm, eps)
    turns = cos_sin.reshape(-1)[: n_rows * n_rot]
    y.reshape(heads.shape)[:] = _rotated(heads, turns, n_rot, half_split, parts)


def hadamard(x: Array, y: Array, *, head: int, head_out: int, n_heads: int, **unused: Any) -> None:
    width = ceil_div(head, 32) * 32
    heads = np.zeros((n_heads, width))
    heads[:, :head] = f64(x, n_heads, head)
    matrix = np.ones((1, 1))
    for _ in range(5):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    turned = heads.reshape(-1, 32) @ matrix / np.sqrt(32)
    y.reshape(n_heads, head_out)[:] = turned.reshape(n_heads, width)[:, :head_out]


def kv_store(
    x: Array, w: Array, cos_sin: Array, cells: Array, cache: Array, step: StepParams, *, width: int,
    n_rows: int, blocks_per_slot: int, head_dim: int = 0, n_rot: int = 0, half_split: int = 0,
    block_size: int = 1, cells_per_block: int = CELL_BLOCK, first_cell: int = 0, eps: float = 0.0,
    norm: int = 0, **consts: Any,
) -> None:  # fmt: skip
    """If numpy lacks the type of `cache`, the array holds the cache's bytes."""
    rows = x.reshape(n_rows, width)[: step.n_rows]
    if norm or n_rot:
        heads = _head_norm(f64(rows, len(rows), width // head_dim, head_dim), w, norm, eps)
        rows = _rotated(heads, cos_sin, n_rot, half_split) if n_rot else heads
        rows = rows.reshape(-1, width).astype(np.float32)
    if cache.dtype == np.uint8:
        out = cache.reshape(-1, cache.shape[-1])
        rows = _stored_blocks(rows, CACHE_TYPES[consts["type"]])
    else:
        out = cache.reshape(-1, width)
    with np.errstate(over="ignore"):  # like the shader, f16 overflows to inf above 65,504
        stored = (step.rows[: len(rows), 0] + 1) % block_size == 0
        at = own_cells(step, len(rows), cells, blocks_per_slot, block_size, cells_per_block)
        out[first_cell + at[stored]] = rows[stored]


def kv_load(
    cache: Array, cells: Array, cos_sin: Array, y: Array, step: StepParams, *, width: int, n_rows: int,
    blocks_per_slot: int, head_dim: int, n_rot: int = 0, half_split: int = 0, **_: Any,
) -> None:  # fmt: skip
    table = cells.reshape(-1, blocks_per_slot)
    at, slots = step.rows[: step.n_rows, 2].astype(np.int64), step.rows[: step.n_rows, 1]
    blocks = table[slots, at // CELL_BLOCK % blocks_per_slot].astype(np.int64)
    rows = cache.reshape(-1, width)[blocks * CELL_BLOCK + at % CELL_BLOCK]
    heads = f64(rows, len(rows), width // head_dim, head_dim)
    if n_rot:
        heads = _rotated(heads, cos_sin, n_rot, half_split)
    y.reshape(-1, width)[: len(rows)] = heads.reshape(len(rows), width)


def _stored_blocks(rows: Array, dtype: str) -> Array:
    """Return rows as bytes of type `dtype`. If a quantized block has a value that is not finite, its scale
    becomes NaN, and its values are coded as 0."""
    if block_of(dtype)[0] == 1:
        return quantize(rows, dtype)
    blocks = rows.reshape(-1, 32)
    is_finite = np.isfinite(blocks).all(axis=1, keepdims=True)
    if dtype in ("q4_1", "q5_1"):
        with np.errstate(over="ignore", invalid="ignore"):
            is_finite &= np.isfinite(np.ptp(blocks, axis=1, keepdims=True))
    out = quantize(np.where(is_finite, blocks, np.float32(0)), dtype)
    out[~is_finite[:, 0], :2] = np.array([np.nan], np.float16).view(np.uint8)
    return out.reshape(len(rows), -1)


def attn_decode(
    q: Array, k: Array, v: Array, cells: Array, sinks: Array, slopes: Array, part: Array, step: StepParams, *,
    n_heads: int, n_kv: int, group: int, q_first: int, n_rows: int, blocks_per_slot: int, n_splits: int,
    window: int, chunk: int, scale: float, softcap: float, head_k: int, head_v: int, final: int = 0,
    has_sinks: int = 0, first: int = 0, has_slopes: int = 0, most: int = 0, **_: Any,
) -> None:  # fmt: skip
    """In `part`, p is exp(score - max). If `final`, `part` gets the result of attn_combine. With `most`, only
    rows of the step at positions below `most` are written."""
    queries = f64(q, n_rows, n_heads, head_k)
    out = np.zeros((n_rows, n_heads, n_splits, head_v + 2))
    out[..., head_v] = NEG_LARGE
    for row in range(min(n_rows, step.n_decode)):
        at = cells_of(step, row, cells, blocks_per_slot)
        begins = max(first, _first_key(len(at), window, chunk))
        start = begins // CELL_BLOCK * CELL_BLOCK
        per_split = ceil_div(ceil_div(len(at) - start, CELL_BLOCK), n_splits) * CELL_BLOCK
        for split in range(n_splits):
            begin = start + split * per_split
            seen = range(len(at))[max(begin, begins) : begin + per_split]
            keys = at[seen.start : seen.stop]
            if len(keys):
                of_heads = cached(k, keys, n_kv), cached(v, keys, n_kv)
                score, values = scores_of(queries[row], *of_heads, group, q_first, scale, softcap)
                if has_slopes:
                    score = score - f64(slopes, n_heads)[:, None] * (len(at) - 1 - np.array(seen))
                out[row, :, split] = part_of(score, values)
    result = np.zeros((n_rows, n_heads, head_v)) if final else out
    if final:
        shape = {"n_heads": n_heads, "n_rows": n_rows, "n_splits": n_splits, "head_v": head_v}
        attn_combine(out, sinks, result, **shape, has_sinks=has_sinks)
    written = (np.arange(n_rows) < step.n_decode) & (step.rows[:n_rows, 0] < most) if most else slice(None)
    part.reshape(result.shape)[written] = result[written]


def part_of(score: Array, values: Array) -> Array:
    """Return a split's (sum of p * v, max, sum of p) for each head, [n_heads, head_v + 2]."""
    top = score.max(axis=1, keepdims=True)
    prob = np.exp(score - top)
    return np.c_[np.einsum("hj,jhd->hd", prob, values), top, prob.sum(axis=1)]


def attn_combine(
    part: Array, sinks: Array, y: Array, *, n_heads: int, n_rows: int, n_splits: int, head_v: int,
    has_sinks: int = 0, **_: Any,
) -> None:  # fmt: skip
    parts = f64(part, n_rows, n_heads, n_splits, head_v + 2)
    top = parts[..., head_v].max(axis=2, keepdims=True)
    if has_sinks:
        top = np.maximum(top, f64(sinks, 1, n_heads, 1))
    factor = np.exp(parts[..., head_v] - top)[..., None]
    total = (factor * parts[..., head_v + 1 :]).sum(axis=2)
    if has_sinks:
        total += np.exp(f64(sinks, 1, n_heads, 1) - top)
    acc = (factor * parts[..., :head_v]).sum(axis=2)
    y.reshape(n_rows, n_heads, head_v)[:] = np.divide(acc, total, out=np.zeros_like(acc), where=total > 0)


def attn_prefill(
    q: Array, k: Array, v: Array, cells: Array, sinks: Array, slopes: Array, y: Array, step: StepParams, *,
    n_heads: int, n_kv: int, group: int, q_first: int, n_rows: int, blocks_per_slot: int, window: int,
    chunk: int, first_head: int, causal: int, scale: float, softcap: float, head_k: int, head_v: int,
    groups: tuple[int, int, int], has_sinks: int = 0, has_slopes: int = 0, most: int = 0, **_: Any,
) -> None:  # fmt: skip
    """Rows outside runs become zeros. The rows that attn_decode computes, rows at positions from `most` on,
    and the heads of other dispatches do not change."""
    heads = slice(first_head, first_head + groups[1])
    queries = f64(q, n_rows, n_heads, head_k)[:, heads]
    q_first += first_head
    out = y.reshape(n_rows, n_heads, head_v)[:, heads]
    out[max(step.n_decode, step.n_rows) :] = 0
    gathered: dict[int, tuple[int, Array, Array]] = {}  # by slot: (n, K, V) of the slot's first n positions
    for row in range(step.n_decode, min(n_rows, step.n_rows)):
        position, slot, (begin, end) = int(step.rows[row, 0]), int(step.rows[row, 1]), _text_of(step, row)
        if most and position >= most:
            continue
        end = (end, position + 1, max(end, position + 1), step.n_rows)[causal]
        if gathered.get(slot, (0,))[0] < end:
            later = step.rows[row : step.n_rows]
            n_keys = max(end, int(later[later[:, 1] == slot, 0].max()) + 1)
            at = cells_of(step, row, cells, blocks_per_slot, n_keys)
            gathered[slot] = n_keys, cached(k, at, n_kv), cached(v, at, n_kv)
        keys, values = gathered[slot][1:]
        seen = range(_first_key(position + 1, window, chunk), end)
        if not causal:
            reach = window // 2 if window else end
            seen = range(max(begin, position - reach), min(end, position + reach + 1))
        keys, values = (part[seen.start : seen.stop] for part in (keys, values))
        score, values = scores_of(queries[row], keys, values, group, q_first, scale, softcap)
        if has_slopes:
            score = score - f64(slopes, n_heads)[heads, None] * abs(np.array(seen) - position)
        logits = np.c_[score, f64(sinks, n_heads)[heads]] if has_sinks else score
        prob = np.exp(score - logits.max(axis=1, keepdims=True))
        total = np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)
        out[row] = np.einsum("hj,jhd->hd", prob / total, values)


def _text_of(step: StepParams, row: int) -> tuple[int, int]:
    """Return the positions at which the row's text begins and ends."""
    runs = step.runs[: step.n_runs].astype(np.int64)
    r = next(r for r, (_, first, n, _) in enumerate(runs) if first <= row < first + n)
    return int(step.states[r, 3]), int(step.states[r, 2])


def _first_key(n_keys: int, window: int, chunk: int) -> int:
    """Return the first position to which a row at position `n_keys` - 1 attends."""
    first = max(0, n_keys - window) if window else 0
    return max(first, (n_keys - 1) // chunk * chunk) if chunk else first


def cached(cache: Array, at: Array, n_kv: int) -> Array:
    """Return the cells `at` of a cache as [n_keys, n_kv, head size]."""
    return cache.reshape(cache.shape[0], n_kv, -1)[at].astype(np.float64)


def scores_of(
    query: Array, keys: Array, values: Array, group: int, q_first: int, scale: float, softcap: float
) -> tuple[Array, Array]:
    """Return a row's scores [n_heads, n_keys] and each q head's values [n_keys, n_heads, head_v], from the
    keys and values of all KV heads."""
    kv_head = (q_first + np.arange(len(query))) // group
    score = scale * np.einsum("hd,jhd->hj", query, keys[:, kv_head])
    return softcap * np.tanh(score / softcap) if softcap else score, values[:, kv_head]
