"""Sparse attention to chosen positions (DeepSeek-AI 2025, arXiv:2512.02556).

Each device with the layer's kv head holds the complete indexer and its keys, so these devices choose the same
positions. Devices of different kinds may choose differently among nearly equal scores.
"""

from __future__ import annotations

from dataclasses import replace

from vkbackend import ops as device_ops
from vkbackend.formats import padded
from vkbackend.meta import split
from vkbackend.meta.ops.dense_attention import hadamard, is_rotated
from vkbackend.meta.split import MIRRORED
from vkbackend.meta.sums import holders_of
from vkbackend.meta.tensor import Tensor, Weight

# Scores are computed for some rows at a time (64 rows in a context of 128k). Scores of 512 rows would exceed
# the largest binding.
SCORES_NBYTES = 1 << 25


def choose(q: Tensor, w: Tensor, keys: Weight, cells: Weight, *, heads: int, top_k: int) -> Tensor:
    """Return the top_k positions of each row in ascending order, u32 [rows, top_k]. A position's score is the
    sum over the indexer's heads of w * max(q . k, 0). The shapes are q [rows, heads * head], w [rows, heads]
    and `keys` [n_cells, head]."""
    graph, rows, head = q.graph, q.rows, keys.shape[1]
    if is_rotated(keys):
        q = hadamard(q, q.width // heads, head)
    split.index_scores(q.state, w.state, keys.state, heads, head)
    chosen = graph.new(rows, top_k, MIRRORED, "chosen", holders_of(q))
    for d in holders_of(chosen):
        on, step, table = graph.on(d, "index"), graph.inputs[d].step, cells.whole(d)
        n_positions = table.shape[1] * device_ops.CELL_BLOCK
        queries, gains = q.on(d).reshape(rows, heads, head), w.on(d)
        ids = replace(chosen.on(d), dtype="u32")
        most = max(1, SCORES_NBYTES // (4 * n_positions))
        for first in range(0, rows, most):
            end = min(first + most, rows)
            scores = graph.scratch((end - first, n_positions), "index scores")
            operands = queries.rows(first, end), gains.rows(first, end)
            on.index_scores(*operands, keys.whole(d), table, scores, step, first_row=first)
            on.index_top_k(scores, ids.rows(first, end), step, first_row=first)
    return chosen


def attend_chosen(
    q: Tensor,
    k: Weight,
    v: Weight,
    cells: Weight,
    chosen: Tensor,
    *,
    heads: int,
    head_dim_k: int,
    head_dim_v: int,
    scale: float,
    sinks: Weight | None = None,
) -> Tensor:
    """Compute `attention` with one kv head over each row's chosen positions. `sinks` [heads] adds a logit per
    head to the softmax's denominator."""
    graph, rows, top_k = q.graph, q.rows, chosen.width
    head_dim = head_dim_v
    if is_rotated(k):
        q = hadamard(q, head_dim_k, padded(head_dim_k, k.dtype))
    head_dim_k, head_dim_v = padded(head_dim_k, k.dtype), padded(head_dim_v, v.dtype)
    state = split.attention(q.state, k.state, v.state, heads, 1, head_dim_k, head_dim_v)
    if sinks:
        split.per_head_weight("attention sinks", state, sinks.state, head_dim_v)
    y = graph.new(rows, heads * head_dim_v, state, "attention")
    for d, out in enumerate(y.views):
        if out is None:
            continue
        local, on, step = out.shape[1] // head_dim_v, graph.on(d, "attention"), graph.inputs[d].step
        q_view, out = q.on(d).reshape(rows, local, head_dim_k), out.reshape(rows, local, head_dim_v)
        first_head = state.ranges[d][0] // head_dim_v if state.ranges else 0
        args = q_view, k.whole(d), v.whole(d), cells.whole(d), replace(chosen.on(d), dtype="u32")
        n_blocks = min(-(-top_k // device_ops.CELL_BLOCK), cells.shape[1])
        n_splits = device_ops.attn_splits(on.limits, rows, local, 1, n_blocks)
        part = graph.scratch((rows, local, n_splits, head_dim_v + 2), "attention parts")
        final = n_splits == 1 and not sinks
        result = out if final else part
        on.attn_chosen(*args, result, step, scale=scale, group=heads, q_first=first_head)
        if not final:
            on.attn_combine(part, out, sinks=sinks.whole(d) if sinks else None)
    return hadamard(y, head_dim_v, head_dim) if is_rotated(v) else y
