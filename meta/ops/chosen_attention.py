"""Sparse attention to chosen positions (DeepSeek-AI 2025, arXiv:2512.02556).

Each device that holds the layer's kv head also holds the complete indexer and its keys, so these devices
choose the same positions. Devices of different kinds may choose differently among nearly equal scores.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vkbackend import ops as device_ops
from vkbackend.buffer import View
from vkbackend.formats import padded
from vkbackend.meta import split
from vkbackend.meta.ops.dense_attention import hadamard, is_rotated
from vkbackend.meta.split import MIRRORED
from vkbackend.meta.sums import holders_of
from vkbackend.meta.tensor import Tensor, TensorGraph, Weight
from vkbackend.ops import Recorder
from vkbackend.step import Mix

# Compute the scores of some rows at a time (64 rows in a context of 128k), because the scores of 512 rows
# would exceed the largest binding.
SCORES_NBYTES = 1 << 25


def choose(
    q: Tensor,
    w: Tensor | None,
    keys: Weight,
    cells: Weight,
    *,
    heads: int,
    top_k: int,
    block: int = 1,
    tail: bool = False,
) -> Tensor:
    """For each row, return the top_k blocks of `block` positions in ascending order, u32 [rows, top_k]. A
    block's score is the sum over the indexer's heads of w * max(q . k, 0), where k is the block's key. The
    shapes are q [rows, heads * head], w [rows, heads] and `keys` [n_cells, head], which has a cell per block
    (kv_store with `block`). With `tail`, the row's own block is the last of the top_k, if it is incomplete.
    Without w, all weights are 1. If a row has at most top_k blocks, all are chosen without scores."""
    assert block == 1 or tail, "index_top_k would read the score of an incomplete block"
    graph, rows, head = q.graph, q.rows, keys.shape[1]
    if is_rotated(keys):
        q = hadamard(q, q.width // heads, head)
    split.index_scores(q.state, w.state if w else None, keys.state, heads, head)
    chosen = graph.new(rows, top_k, MIRRORED, "chosen", holders_of(q))
    for d in holders_of(chosen):
        on, step, table = graph.on(d, "index"), graph.inputs[d].step, cells.whole(d)
        n_positions = table.shape[1] * device_ops.CELL_BLOCK // block
        queries, gains = q.on(d).reshape(rows, heads, head), w.on(d) if w else None
        ids = replace(chosen.on(d), dtype="u32")
        most = max(1, SCORES_NBYTES // (4 * n_positions))
        for first in range(0, rows, most):
            end = min(first + most, rows)
            scores = graph.scratch((end - first, n_positions), "index scores")
            operands = queries.rows(first, end), gains.rows(first, end) if gains else None
            place: dict[str, Any] = {"first_row": first, "block": block}
            by_units = device_ops.scores_by_units(on.limits, heads, head)
            score = on.index_scores_coop if by_units else on.index_scores
            score(*operands, keys.whole(d), table, scores, step, n_best=top_k - tail, **place)
            on.index_top_k(scores, ids.rows(first, end), step, tail=tail, **place)
    return chosen


def pool_keys(
    x: Tensor,
    raw: Weight,
    cells: Weight,
    block: int,
    bias: Weight | None = None,
    *,
    first: int = 0,
    overlap: bool = False,
) -> Tensor:
    """Return the mean of the keys of each block of `block` positions. The mean is in the row of the block's
    last position. The keys x [rows, head] were stored in `raw` [n_cells, head]. They may begin at element
    `first` of a wider `raw`. With `bias` [block, head], gates that follow the keys weigh the mean. With
    `overlap`, x, the gates and `bias` have two vectors per position, and the result has one
    (Recorder.pool_keys)."""
    width, state = (x.width // 2, split.resized(x.state, 1, 2)) if overlap else (x.width, x.state)
    y = x.graph.new(x.rows, width, state, "pooled keys", holders_of(x))
    for d in holders_of(y):
        step = x.graph.inputs[d].step
        of_gates = bias.whole(d) if bias else None
        args = raw.whole(d), cells.whole(d), y.on(d), step
        how: dict[str, Any] = {"block": block, "bias": of_gates, "first": first, "overlap": overlap}
        x.graph.on(d, "index").pool_keys(*args, **how)
    return y


def choose_blocks(q: Tensor, keys: Weight, cells: Weight, *, top_k: int, block: int, n_local: int) -> Tensor:
    """For each row and kv head, return the top_k blocks of `block` positions in ascending order, u32 [rows,
    kv_heads * top_k]. Every kv head has an indexer's head in q [rows, kv_heads * head]. A block's score is
    the largest q . k of its positions. The row's own block and the n_local - 1 blocks before it are always
    chosen. `keys` is [n_cells, head]."""
    graph, rows, head = q.graph, q.rows, keys.shape[1]
    state = split.choose_blocks(q.state, keys.state, head, top_k)
    if is_rotated(keys):
        q = hadamard(q, head, padded(head, keys.dtype))
    chosen = graph.new(rows, q.width // head * top_k, state, "chosen", holders_of(q))
    for d in holders_of(chosen):
        on, step, table = graph.on(d, "index"), graph.inputs[d].step, cells.whole(d)
        queries = q.on(d).reshape(rows, q.on(d).shape[1] // head, head)
        lists, n_blocks = queries.shape[1], -(-table.shape[1] * device_ops.CELL_BLOCK // block)
        ids = replace(chosen.on(d), dtype="u32").reshape(rows * lists, top_k)
        by_units = device_ops.maxima_by_units(on.limits, lists, head, block, n_local)
        score = on.index_maxima_coop if by_units else on.index_maxima
        most = max(1, SCORES_NBYTES // (4 * lists * n_blocks))
        for first in range(0, rows, most):
            end = min(first + most, rows)
            maxima = graph.scratch((end - first, lists, n_blocks), "index scores")
            place: dict[str, Any] = {"first_row": first, "block": block}
            args = queries.rows(first, end), keys.whole(d), table, maxima, step
            score(*args, n_local=n_local, n_best=top_k, **place)
            by_list = maxima.reshape((end - first) * lists, n_blocks)
            on.index_top_k(by_list, ids.rows(first * lists, end * lists), step, n_lists=lists, **place)
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
    kv_heads: int = 1,
    block: int = 1,
    tail: bool = False,
    sinks: Weight | None = None,
) -> Tensor:
    """Compute `attention` over each row's chosen blocks of `block` positions. There is one list of blocks for
    all kv heads, or one for each (`choose_blocks`). With `tail`, the last block of a list may be incomplete.
    `sinks` [heads] adds a logit per head to the softmax's denominator."""
    graph, rows, group = q.graph, q.rows, heads // kv_heads
    top_k = chosen.width if chosen.state == MIRRORED else chosen.width // kv_heads
    head_dim = head_dim_v
    if is_rotated(k):
        q = hadamard(q, head_dim_k, padded(head_dim_k, k.dtype))
    head_dim_k, head_dim_v = padded(head_dim_k, k.dtype), padded(head_dim_v, v.dtype)
    state = split.attention(q.state, k.state, v.state, heads, kv_heads, head_dim_k, head_dim_v)
    if sinks:
        split.per_head_weight("attention sinks", state, sinks.state, head_dim_v)
    y = graph.new(rows, heads * head_dim_v, state, "attention")
    for d, out in enumerate(y.views):
        if out is None:
            continue
        local, on, step = out.shape[1] // head_dim_v, graph.on(d, "attention"), graph.inputs[d].step
        q_view, out = q.on(d).reshape(rows, local, head_dim_k), out.reshape(rows, local, head_dim_v)
        first_head = state.ranges[d][0] // head_dim_v if state.ranges else 0
        lists = replace(chosen.on(d), dtype="u32")
        lists = lists.reshape(rows * lists.shape[1] // top_k, top_k)
        args = q_view, k.whole(d), v.whole(d), cells.whole(d), lists
        n_blocks = min(-(-top_k * block // device_ops.CELL_BLOCK), cells.shape[1])
        n_kv = k.whole(d).shape[1] // head_dim_k
        how: dict[str, Any] = {"scale": scale, "group": group, "q_first": first_head % group}
        heads_here = min(group, local), head_dim_k, head_dim_v
        of_blocks = device_ops.blocks_by_units(on.limits, *heads_here, block)
        units = of_blocks or device_ops.chosen_by_units(on.limits, *heads_here)
        part = parts_of(graph, d, out, n_kv, n_blocks, sinks, units)
        lists_how = {**how, "block": block, "tail": tail}
        is_prompt = part is out and not graph.kind.mix.decodes
        if of_blocks:
            joint = device_ops.joint_positions(on.limits, group, head_dim_k, head_dim_v, block, top_k)
            if joint and is_prompt:
                on.attn_blocks_coop(*args, part, step, joint=joint, together=True, **lists_how)
            on.attn_blocks_coop(*args, part, step, joint=joint if is_prompt else 0, **lists_how)
        elif units:
            dense = top_k * block - tail
            if not attend_to_all(on, graph.kind.mix, args[:4], part, step, dense, how):
                dense = 0
            on.attn_chosen_coop(*args, part, step, dense=dense, **lists_how)
        else:
            on.attn_chosen(*args, part, step, **lists_how)
        if part is not out:
            on.attn_combine(part, out, sinks=sinks.whole(d) if sinks else None)
    return hadamard(y, head_dim_v, head_dim) if is_rotated(v) else y


def attend_to_all(
    on: Recorder,
    mix: Mix,
    args: tuple[View, View, View, View],
    part: View,
    step: View,
    most: int,
    how: dict[str, Any],
) -> bool:
    """Compute the rows at positions below `most`, whose blocks are all chosen, without lists: no cells are
    looked up by key, and rows of a prompt share tiles. Return False, and compute none, if the device lacks a
    kernel for decoding rows or for prompts."""
    q, k, v, cells = args
    head_k, head_v = q.shape[2], part.shape[-1] - 2 * (len(part.shape) > 3)
    n_decoding = q.shape[0] if mix.decodes else 0 if mix is Mix.PREFILL else min(q.shape[0], cells.shape[0])
    heads = min(how["group"], q.shape[1]), head_k, head_v
    if n_decoding and not device_ops.heads_by_units(on.limits, *heads):
        return False
    if not mix.decodes:
        if len(part.shape) > 3 or not device_ops.attends_by_units(on.limits, q.shape[0], head_k, head_v):
            return False
        on.attn_prefill_coop(*args, part, step, most=most, **how)
    if n_decoding:
        rows = q.rows(0, n_decoding), k, v, cells, part.rows(0, n_decoding)
        on.attn_decode_coop(*rows, step, most=most, **how)
    return True


def parts_of(
    graph: TensorGraph, d: int, out: View, n_kv: int, n_blocks: int, sinks: Weight | None, tile_heads: int = 0
) -> View:
    """Return the view to which attention writes its result on device d: `out` [rows, heads, head_dim]. If
    keys are split, return scratch memory for the partial results, which attn_combine adds. A workgroup on
    matrix units computes `tile_heads` heads."""
    rows, heads, head_dim = out.shape
    tiled = {"tile_heads": tile_heads} if tile_heads else {}
    n_splits = device_ops.attn_splits(graph.on(d, "attention").limits, rows, heads, n_kv, n_blocks, **tiled)
    if n_splits == 1 and not sinks:
        return out
    return graph.scratch((rows, heads, n_splits, head_dim + 2), "attention parts")
