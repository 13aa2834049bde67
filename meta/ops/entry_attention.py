"""Attention to a window of vectors and to entries, which are weighted means of blocks (DeepSeek-AI 2026)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vkbackend import ops as device_ops
from vkbackend.meta import split
from vkbackend.meta.ops.chosen_attention import parts_of
from vkbackend.meta.ops.dense_attention import hadamard, is_rotated
from vkbackend.meta.tensor import Tensor, Weight


def attend_entries(
    q: Tensor,
    kv: Weight,
    cells: Weight,
    entry_cells: Weight,
    chosen: Tensor | None,
    *,
    heads: int,
    scale: float,
    window: int,
    block: int,
    first_entry: int,
    sinks: Weight | None = None,
) -> Tensor:
    """Return the attention of q [rows, heads * head] over the last `window` positions and over entries, in
    one softmax.

    The first `first_entry` cells of `kv` [n_cells, head] hold vectors of positions, which are both key and
    value, at the places in `cells`. The others hold entries of blocks of `block` positions, at the places in
    `entry_cells` (Recorder.attn_entries). `chosen` are the blocks of each row (`choose` with `tail`), by
    default all complete blocks. `sinks` [heads] adds a logit per head to the softmax's denominator.
    """
    graph, rows, head = q.graph, q.rows, q.width // heads
    rotated = is_rotated(kv)
    if rotated:
        q = hadamard(q, head, head)
    state = split.attention(q.state, kv.state, kv.state, heads, 1, head, head)
    if sinks:
        split.per_head_weight("attention sinks", state, sinks.state, head)
    y = graph.new(rows, heads * head, state, "attention")
    for d, out in enumerate(y.views):
        if out is None:
            continue
        local, on, step = out.shape[1] // head, graph.on(d, "attention"), graph.inputs[d].step
        q_view, out = q.on(d).reshape(rows, local, head), out.reshape(rows, local, head)
        lists = replace(chosen.on(d), dtype="u32") if chosen else None
        n_keys = window + (chosen.width if chosen else cells.shape[1] * device_ops.CELL_BLOCK // block)
        n_blocks = min(-(-n_keys // device_ops.CELL_BLOCK), cells.shape[1])
        part = parts_of(graph, d, out, 1, n_blocks, sinks)
        how: dict[str, Any] = {"scale": scale, "group": heads, "window": window, "block": block}
        how["q_first"] = state.ranges[d][0] // head if state.ranges else 0
        args = q_view, kv.whole(d), cells.whole(d), entry_cells.whole(d), lists, part, step
        on.attn_entries(*args, first_entry=first_entry, **how)
        if part is not out:
            on.attn_combine(part, out, sinks=sinks.whole(d) if sinks else None)
    return hadamard(y, head, head) if rotated else y
