from __future__ import annotations

from typing import Any

import numpy as np

from vkbackend.ops.attention_tiles import CELL_BLOCK
from vkbackend.step import StepParams
from vkbackend.twins.arrays import Array, ceil_div, f64
from vkbackend.twins.attention import NEG_LARGE, attn_combine, cached, cells_of, part_of, scores_of


def index_scores(
    q: Array, w: Array, k: Array, cells: Array, y: Array, step: StepParams, *, n_heads: int, n_rows: int,
    first_row: int, blocks_per_slot: int, n_positions: int, head: int, **_: Any,
) -> None:  # fmt: skip
    queries, gains = f64(q, n_rows, n_heads, head), f64(w, n_rows, n_heads)
    out = y.reshape(n_rows, n_positions)
    for row in range(min(n_rows, step.n_rows - first_row)):
        at = cells_of(step, first_row + row, cells, blocks_per_slot)
        products = queries[row] @ k.reshape(k.shape[0], -1)[at].astype(np.float64).T
        out[row, : len(at)] = gains[row] @ np.maximum(products, 0)


def index_top_k(
    x: Array, ids: Array, step: StepParams, *, n_positions: int, n_rows: int, first_row: int, n_chosen: int,
    **_: Any,
) -> None:  # fmt: skip
    rows, out = x.reshape(n_rows, n_positions), ids.reshape(n_rows, n_chosen)
    for row in range(min(n_rows, step.n_rows - first_row)):
        scores = rows[row, : int(step.rows[first_row + row, 0]) + 1]
        order = np.lexsort((np.arange(len(scores)), -np.nan_to_num(scores, nan=np.inf), ~np.isnan(scores)))
        chosen = np.sort(order[:n_chosen])
        out[row, : len(chosen)] = chosen


def attn_chosen(
    q: Array, k: Array, v: Array, cells: Array, chosen: Array, part: Array, step: StepParams, *,
    n_heads: int, n_kv: int, group: int, q_first: int, n_rows: int, blocks_per_slot: int, n_splits: int,
    n_chosen: int, scale: float, head_k: int, head_v: int, final: int = 0, **_: Any,
) -> None:  # fmt: skip
    queries, positions = f64(q, n_rows, n_heads, head_k), chosen.reshape(n_rows, n_chosen)
    out = np.zeros((n_rows, n_heads, n_splits, head_v + 2))
    out[..., head_v] = NEG_LARGE
    for row in range(min(n_rows, step.n_rows)):
        at = cells_of(step, row, cells, blocks_per_slot)
        at = at[positions[row, : min(len(at), n_chosen)]]
        per_split = ceil_div(ceil_div(len(at), CELL_BLOCK), n_splits) * CELL_BLOCK
        for split in range(n_splits):
            keys = at[split * per_split : (split + 1) * per_split]
            if len(keys):
                of_heads = cached(k, keys, n_kv), cached(v, keys, n_kv)
                score, values = scores_of(queries[row], *of_heads, group, q_first, scale, 0.0)
                out[row, :, split] = part_of(score, values)
    if final:
        shape = {"n_heads": n_heads, "n_rows": n_rows, "n_splits": n_splits, "head_v": head_v}
        attn_combine(out, out, part, **shape)
    else:
        part.reshape(out.shape)[:] = out
