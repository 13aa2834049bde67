"""RoPE, stores to KV caches, and attention to all positions that a row's mask allows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vkbackend import ops as device_ops
from vkbackend.buffer import View, Virtual
from vkbackend.formats import block_of, padded
from vkbackend.meta import split
from vkbackend.meta.split import MIRRORED
from vkbackend.meta.sums import holders_of, whole
from vkbackend.meta.tensor import Tensor, TensorGraph, Weight
from vkbackend.step import Mix


def rope(x: Tensor, head_dim: int, table: str = "rope", half_split: bool = False, parts: int = 1) -> Tensor:
    """Rotate each head by the cos and sin of the row's position (Su et al. 2021). The elements of a rotated
    pair are adjacent, or half a head apart if `half_split`. With `half_split`, a head may consist of `parts`,
    whose elements are half a part apart."""
    graph = x.graph
    y = graph.new(x.rows, x.width, split.per_head("rope", x.state, head_dim), "rope", holders_of(x))
    for d, out in enumerate(y.views):
        if out is not None:
            heads = out.shape[1] // head_dim
            shape, full = (x.rows, heads, head_dim), graph.inputs[d].rope[table]
            cos_sin = View(full.buffer, full.offset, (x.rows, *full.shape[1:]))
            heads_in, heads_out = x.on(d).reshape(*shape), out.reshape(*shape)
            how: dict[str, Any] = {"half_split": half_split, "parts": parts}
            graph.on(d, "rope").rope(heads_in, cos_sin, heads_out, **how)
    return y


def hadamard(x: Tensor, head_dim: int, new_dim: int) -> Tensor:
    """Rotate blocks of 32 elements of each head, and pad or cut heads to `new_dim` elements
    (Recorder.hadamard)."""
    graph = x.graph
    state = split.per_new_head("hadamard", x.state, head_dim, new_dim)
    y = graph.new(x.rows, x.width // head_dim * new_dim, state, "hadamard", holders_of(x))
    for d, out in enumerate(y.views):
        if out is not None:
            shape = x.rows, out.shape[1] // new_dim
            graph.on(d, "hadamard").hadamard(x.on(d).reshape(*shape, head_dim), out.reshape(*shape, new_dim))
    return y


def is_rotated(cache: Weight) -> bool:
    """Return whether K, V or index keys are rotated by `hadamard` before they are stored. Rotations of q and
    k cancel in their product; attention's result is rotated back. Rotation reduces the rounding error of
    quantized types (docs/fit.md), and pads heads to whole blocks."""
    return block_of(cache.dtype)[0] > 1


def kv_store(
    x: Tensor, cache: Weight, cells: Weight, head_dim: int, *, block: int = 1, first: int = 0
) -> None:
    """Write each row of x [rows, heads * head_dim] to the row's cell of `cache`. If `block` is above 1, only
    rows at the ends of blocks of `block` positions are written, each to the block's cell. These cells begin
    at cell `first` (Recorder.kv_store)."""
    if is_rotated(cache):
        x = hadamard(x, head_dim, padded(head_dim, cache.dtype))
    split.elementwise("kv_store", x.state, cache.state)
    graph = x.graph
    for d, view in enumerate(x.views):
        if view is not None:
            step = graph.inputs[d].step
            on = graph.on(d, "kv_store")
            on.kv_store(view, cells.whole(d), cache.whole(d), step, block=block, first=first)


def kv_load(graph: TensorGraph, cache: Weight, cells: Weight) -> Tensor:
    """Return the rows of `cache` [n_cells, width] at the positions in StepParams' tokens. Every device holds
    the complete cache."""
    y = graph.new(graph.kind.n_rows, cache.shape[1], MIRRORED, "kv_load")
    for d, inputs in enumerate(graph.inputs):
        on, width = graph.on(d, "kv_load"), cache.shape[1]
        on.kv_load(cache.whole(d), cells.whole(d), y.on(d), inputs.step, head_dim=width)
    return y


def kv_move(
    graph: TensorGraph,
    cache: Weight,
    cells: Weight,
    rows: Sequence[Virtual],
    head_dim: int,
    rope: tuple[str, bool] | None = None,
) -> None:
    """Read the cells of the rows' source positions (StepParams' tokens), and write them to the cells of the
    rows' positions. `rope` (table, half_split) also rotates each head. Between reading and writing, the cells
    are in `rows[d]` on device d."""
    n_rows, stored = graph.kind.n_rows, padded(head_dim, cache.dtype)
    for d, array in enumerate(rows):
        if not cache.pieces[d]:
            continue
        inputs, held = graph.inputs[d], cache.whole(d)
        moved = View(array, 0, (n_rows, held.shape[1]))
        rotation = None
        if rope:
            full = inputs.rope[rope[0]]
            cos_sin = View(full.buffer, full.offset, (n_rows, *full.shape[1:]))
            rotation = device_ops.Rotation(cos_sin, rope[1])
        on, table = graph.on(d, "kv_move"), cells.whole(d)
        between = rotation if is_rotated(cache) else None
        on.kv_load(held, table, moved, inputs.step, head_dim=stored, rotation=None if between else rotation)
        if between:
            shape = n_rows, held.shape[1] // stored
            heads = graph.scratch((*shape, head_dim), "moved heads")
            on.hadamard(moved.reshape(*shape, stored), heads)
            on.rope(heads, between.cos_sin, heads, half_split=between.half_split)
            on.hadamard(heads, moved.reshape(*shape, stored))
        on.kv_store(moved, table, held, inputs.step)


def attention(
    q: Tensor,
    k: Weight,
    v: Weight,
    cells: Weight,
    *,
    heads: int,
    kv_heads: int,
    head_dim_k: int,
    head_dim_v: int,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    first: int = 0,
    softcap: float = 0.0,
    sinks: Weight | None = None,
    causal: bool = True,
    sees_end: bool = False,
    n_runs: int = 0,
    slopes: Weight | None = None,
) -> Tensor:
    """Return grouped-query attention (Ainslie et al. 2023), softmax(scale q k^T) v, as [rows, heads *
    head_dim_v].

    If `window` is set, a row attends to the last `window` positions, including its own. If `chunk` is set, a
    row attends to its own chunk of `chunk` positions. With `first`, the rows of a decoding step attend only
    to positions from `first` on. A `softcap` c replaces each score s by c * tanh(s / c). `sinks` [heads],
    split like the heads, adds a logit per head to the softmax's denominator (Xiao et al. 2024). If `causal`
    is False, a row also attends to later rows of its run; a `window` then covers window / 2 positions on each
    side. Such steps have Mix.PREFILL. ALiBi's `slopes` [heads] (Press et al. 2022) are split like the heads.
    If `sees_end`, rows attend to later rows only in runs that state an end (step.Run). By default, a slot has
    one run per step. `n_runs` sets another maximum number of runs of a step.
    """
    graph, rows, group = q.graph, q.rows, heads // kv_heads
    head_dim = head_dim_v
    if is_rotated(k):
        q = hadamard(q, head_dim_k, padded(head_dim_k, k.dtype))
    head_dim_k, head_dim_v = padded(head_dim_k, k.dtype), padded(head_dim_v, v.dtype)
    state = split.attention(q.state, k.state, v.state, heads, kv_heads, head_dim_k, head_dim_v)
    if sinks:
        split.per_head_weight("attention sinks", state, sinks.state, head_dim_v)
    if slopes:
        split.per_head_weight("attention slopes", state, slopes.state, head_dim_v)
    assert causal or graph.kind.mix is Mix.PREFILL, graph.kind
    assert not sees_end or not graph.kind.mix.decodes, graph.kind
    assert not first or graph.kind.mix is Mix.DECODE, graph.kind
    y = graph.new(rows, heads * head_dim_v, state, "attention")
    for d, out in enumerate(y.views):
        if out is None:
            continue
        local = out.shape[1] // head_dim_v
        on, step = graph.on(d, "attention"), graph.inputs[d].step
        q_view, out = q.on(d).reshape(rows, local, head_dim_k), out.reshape(rows, local, head_dim_v)
        caches = k.whole(d), v.whole(d), cells.whole(d)
        # A device's first q head may be in the middle of a group.
        first_head = state.ranges[d][0] // head_dim_v if state.ranges else 0
        how: dict[str, Any] = {"scale": scale, "group": group, "q_first": first_head % group}
        how |= {"window": window, "chunk": chunk, "softcap": softcap}
        own_sinks = sinks.whole(d) if sinks else None
        how["slopes"] = slopes.whole(d) if slopes else None
        if graph.kind.mix is not Mix.PREFILL:
            # In a mixed step decoding rows come first, at most one per slot.
            n = rows if graph.kind.mix.decodes else min(rows, caches[2].shape[0])
            together = n if graph.kind.mix is Mix.FEW else 1
            n_kv = caches[0].shape[1] // head_dim_k
            sizes = min(group, local), head_dim_k, head_dim_v
            units = 0 if slopes else device_ops.heads_by_units(on.limits, *sizes)
            decode = on.attn_decode_coop if units else on.attn_decode
            tiled = {"tile_heads": units} if units else {}
            # The rows of a run share workgroups, so a run needs only as many splits as one row.
            n_splits = device_ops.attn_splits(
                on.limits, -(-n // together), local, n_kv, caches[2].shape[1], window, **tiled
            )
            q_n, out_n = q_view.rows(0, n), out.rows(0, n)
            if n_splits == 1:
                decode(q_n, *caches, out_n, step, sinks=own_sinks, run_rows=together, first=first, **how)
            else:
                part = graph.scratch((n, local, n_splits, head_dim_v + 2), "attention parts")
                decode(q_n, *caches, part, step, run_rows=together, first=first, **how)
                on.attn_combine(part, out_n, sinks=own_sinks)
        if not graph.kind.mix.decodes:
            by_units = device_ops.attends_by_units(on.limits, rows, head_dim_k, head_dim_v)
            attend = on.attn_prefill_coop if by_units else on.attn_prefill
            how |= {"causal": causal, "sees_end": sees_end, "n_runs": n_runs}
            attend(q_view, *caches, out, step, sinks=own_sinks, **how)
    return hadamard(y, head_dim_v, head_dim) if is_rotated(v) else y


def self_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cells: Weight,
    *,
    head_dim: int,
    n_runs: int,
    sees_all: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(scale q k^T) v [rows, heads * head_dim] among the rows of a step, without
    caches. A row attends to the positions that its run states (step.Run), or to all rows. Position p is row
    p. `cells` is u32 [1, rows / 32] = 0, 1, 2, ... All of q, k and v have equally many heads. `scale` is 1 /
    sqrt(head_dim) by default."""
    graph, rows = q.graph, q.rows
    assert graph.kind.mix is Mix.PREFILL, graph.kind
    q, k, v = whole(q), whole(k), whole(v)
    state = split.per_head(
        "self_attention", split.elementwise("self_attention", q.state, k.state, v.state), head_dim
    )
    y = graph.new(rows, q.width, state, "attention", holders_of(q))
    for d, out in enumerate(y.views):
        if out is None:
            continue
        on, heads = graph.on(d, "attention"), out.shape[1] // head_dim
        by_units = device_ops.attends_by_units(on.limits, rows, head_dim, head_dim)
        attend = on.attn_prefill_coop if by_units else on.attn_prefill
        shape = rows, heads, head_dim
        table = cells.whole(d)
        blocks = View(table.buffer, table.offset, (1, rows // device_ops.CELL_BLOCK), "u32")
        how: dict[str, Any] = {"scale": scale or head_dim**-0.5, "causal": False, "n_runs": n_runs}
        how["sees_all"] = sees_all
        step = graph.inputs[d].step
        attend(q.on(d).reshape(*shape), k.on(d), v.on(d), blocks, out.reshape(*shape), step, **how)
    return y
