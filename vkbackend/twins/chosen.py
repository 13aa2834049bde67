from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from vkbackend.ops.attention_tiles import CELL_BLOCK
from vkbackend.step import StepParams
from vkbackend.twins.arrays import Array, ceil_div, f64
from vkbackend.twins.attention import NEG_LARGE, attn_combine, cached, cells_of, part_of, scores_of


def index_scores(
    q: Array, w: Array, k: Array, cells: Array, y: Array, step: StepParams, *, n_heads: int, n_rows: int,
    first_row: int, blocks_per_slot: int, n_positions: int, block_size: int = 1,
    cells_per_block: int = CELL_BLOCK, n_best: int = 0, head: int, has_w: int = 1, **_: Any,
) -> None:  # fmt: skip
    queries = f64(q, n_rows, n_heads, head)
    gains = f64(w, n_rows, n_heads) if has_w else np.ones((n_rows, n_heads))
    out = y.reshape(n_rows, n_positions)
    for row in range(min(n_rows, step.n_rows - first_row)):
        at = cells_of(step, first_row + row, cells, blocks_per_slot, 0, block_size, cells_per_block)
        if len(at) <= n_best:
            continue
        products = queries[row] @ k.reshape(k.shape[0], -1)[at].astype(np.float64).T
        out[row, : len(at)] = gains[row] @ np.maximum(products, 0)


def pool_keys(
    k: Array, cells: Array, bias: Array, y: Array, step: StepParams, *, n_rows: int, blocks_per_slot: int,
    block_size: int, cell_quads: int, first_quad: int, head: int, gated: int = 1, series: int = 1, **_: Any,
) -> None:  # fmt: skip
    out, first = y.reshape(n_rows, head), 4 * first_quad
    values = k.reshape(k.shape[0], 4 * cell_quads)[:, first : first + (1 + gated) * series * head]
    out[:] = 0
    for row in range(min(n_rows, step.n_rows)):
        at = cells_of(step, row, cells, blocks_per_slot)
        if len(at) % block_size == 0:
            at = at[-series * block_size :]
            held = cached(values, at, (1 + gated) * series).reshape(len(at), 1 + gated, series, head)
            of = np.arange(len(at)) >= len(at) - block_size if series > 1 else np.zeros(len(at), bool)
            of_row = np.arange(len(at)), slice(None), of.astype(int)
            keys, *gates = held[of_row].swapaxes(0, 1)
            place = np.arange(len(at)) % block_size
            biases = f64(bias, block_size, series, head)[place, of_row[2]] if gated else 0.0
            logits = gates[0] + biases if gated else np.zeros(keys.shape)
            weights = np.exp(logits - logits.max(axis=0))
            out[row] = (weights * keys).sum(axis=0) / weights.sum(axis=0)


def index_maxima(
    q: Array, k: Array, cells: Array, y: Array, step: StepParams, *, n_heads: int, n_rows: int,
    first_row: int, blocks_per_slot: int, n_blocks: int, block_size: int, n_local: int, n_best: int = 0,
    head: int, **_: Any,
) -> None:  # fmt: skip
    queries, out = f64(q, n_rows, n_heads, head), y.reshape(n_rows, n_heads, n_blocks)
    largest = np.finfo(np.float32).max
    for row in range(min(n_rows, step.n_rows - first_row)):
        at = cells_of(step, first_row + row, cells, blocks_per_slot)
        if ceil_div(len(at), block_size) <= n_best:
            continue
        products = queries[row] @ k.reshape(k.shape[0], -1)[at].astype(np.float64).T
        starts = np.arange(0, len(at), block_size)
        out[row, :, : len(starts)] = np.maximum.reduceat(products, starts, axis=1)
        out[row, :, max(0, len(starts) - n_local) : len(starts)] = largest


def index_top_k(
    x: Array, ids: Array, step: StepParams, *, n_positions: int, n_rows: int, first_row: int, n_chosen: int,
    n_lists: int = 1, block_size: int = 1, tail: int = 0, **_: Any,
) -> None:  # fmt: skip
    rows, out = x.reshape(n_rows, n_positions), ids.reshape(n_rows, n_chosen)
    for row in range(min(n_rows, (step.n_rows - first_row) * n_lists)):
        end = int(step.rows[first_row + row // n_lists, 0]) + 1
        scores = rows[row, : end // block_size if tail else ceil_div(end, block_size)]
        order = np.lexsort((np.arange(len(scores)), -np.nan_to_num(scores, nan=np.inf), ~np.isnan(scores)))
        chosen = np.sort(order[: n_chosen - tail])
        if tail and end % block_size:
            chosen = np.append(chosen, len(scores))
        out[row, : len(chosen)] = chosen


def attn_chosen(
    q: Array, k: Array, v: Array, cells: Array, chosen: Array, part: Array, step: StepParams, *,
    n_heads: int, n_kv: int, group: int, q_first: int, n_rows: int, blocks_per_slot: int, n_splits: int,
    n_chosen: int, n_lists: int = 1, block_size: int = 1, tail: int = 0, scale: float, head_k: int,
    head_v: int, final: int = 0, dense: int = 0, joint: int = 0, rows: int = 1, **_: Any,
) -> None:  # fmt: skip
    queries, lists = f64(q, n_rows, n_heads, head_k), chosen.reshape(n_rows, n_lists, n_chosen)
    out = np.zeros((n_rows, n_heads, n_splits, head_v + 2))
    out[..., head_v] = NEG_LARGE
    kv_head = (q_first + np.arange(n_heads)) // group
    for row, i in product(range(min(n_rows, step.n_rows)), range(n_lists)):
        at = cells_of(step, row, cells, blocks_per_slot)
        own = len(at) % block_size if tail else (len(at) - 1) % block_size + 1
        j = np.arange(min(len(at), (n_chosen - 1) * block_size + own))
        at = at[lists[row, i, j // block_size] * block_size + j % block_size]
        per_split = ceil_div(ceil_div(len(at), CELL_BLOCK), n_splits) * CELL_BLOCK
        heads = slice(None) if n_lists == 1 else kv_head == i
        for split in range(n_splits):
            keys = at[split * per_split : (split + 1) * per_split]
            if len(keys):
                of_heads = cached(k, keys, n_kv), cached(v, keys, n_kv)
                score, values = scores_of(queries[row], *of_heads, group, q_first, scale, 0.0)
                out[row, heads, split] = part_of(score, values)[heads]
    pos = step.rows[:n_rows, 0]
    is_row = np.arange(n_rows) < step.n_rows
    kept = (pos < dense) & is_row
    kept |= ~((pos < joint) & is_row) if rows > 1 else (pos < joint) & is_row
    result = np.zeros((n_rows, n_heads, head_v), np.float32) if final else out
    if final:
        shape = {"n_heads": n_heads, "n_rows": n_rows, "n_splits": n_splits, "head_v": head_v}
        attn_combine(out, out, result, **shape)
    part.reshape(result.shape)[~kept] = result[~kept]


def attn_entries(
    q: Array, k: Array, v: Array, cells: Array, entry_cells: Array, chosen: Array, part: Array,
    step: StepParams, *, n_heads: int, n_kv: int, group: int, q_first: int, n_rows: int,
    blocks_per_slot: int, n_splits: int, n_chosen: int, block_size: int, cells_per_block: int,
    first_entry: int, window: int, scale: float, head_k: int, head_v: int, final: int = 0, **_: Any,
) -> None:  # fmt: skip
    queries, vectors = f64(q, n_rows, n_heads, head_k), k.reshape(k.shape[0], head_k)
    lists = chosen.reshape(n_rows, n_chosen) if n_chosen else None
    out = np.zeros((n_rows, n_heads, n_splits, head_v + 2))
    out[..., head_v] = NEG_LARGE
    for row in range(min(n_rows, step.n_rows)):
        at = cells_of(step, row, cells, blocks_per_slot)
        entries = cells_of(step, row, entry_cells, blocks_per_slot, 0, block_size, cells_per_block)
        if lists is not None:
            entries = entries[lists[row, : min(len(entries), n_chosen - 1)]]
        keys_at = np.concatenate([first_entry + entries, at[-window:]])
        per_split = ceil_div(ceil_div(len(keys_at), CELL_BLOCK), n_splits) * CELL_BLOCK
        for split in range(n_splits):
            keys = keys_at[split * per_split : (split + 1) * per_split]
            if len(keys):
                held = cached(vectors, keys, 1)
                score, values = scores_of(queries[row], held, held, group, q_first, scale, 0.0)
                out[row, :, split] = part_of(score, values)
    if final:
        shape = {"n_heads": n_heads, "n_rows": n_rows, "n_splits": n_splits, "head_v": head_v}
        attn_combine(out, out, part, **shape)
    else:
        part.reshape(out.shape)[:] = out
