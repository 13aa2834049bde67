"""Ops on tensors over N devices: each derives its result's split state by rule and records itself per device.

The first op that needs the whole value of a PARTIAL operand makes it whole. So no function here is called
reduce, and a model that uses them does not know how many devices there are. The file is long because every op
has a function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vkbackend import ops as device_ops
from vkbackend.buffer import View, Virtual
from vkbackend.formats import row_nbytes
from vkbackend.meta import split
from vkbackend.meta.candidates import places
from vkbackend.meta.graph import Graph
from vkbackend.meta.split import MIRRORED, Kind
from vkbackend.meta.sums import add as add
from vkbackend.meta.sums import each, holders_of, latest, whole
from vkbackend.meta.sums import together as together
from vkbackend.meta.tensor import Tensor, Weight
from vkbackend.step import Mix


def embed(graph: Graph, table: Weight, ids: int = device_ops.TOKENS) -> Tensor:
    """The rows of `table` [n_vocab, n_embd] for the step's tokens, or for what else `ids` says (its
    positions). The result is whole on every device."""
    y = graph.new(graph.n_rows, table.shape[1], MIRRORED, "embed")
    for d, inputs in enumerate(graph.inputs):
        for first, view in table.pieces[d]:
            graph.on(d, "embed").embed(view, y.on(d), inputs.step, ids=ids, first=first)
    return y


def outputs(x: Tensor) -> Tensor:
    """The rows of x whose logits are wanted [n_outputs, width]."""
    x, graph = whole(x), x.graph
    y = graph.new(graph.n_outputs, x.width, split.rows_op("outputs", x.state), "outputs", holders_of(x))
    for d in holders_of(y):
        step = graph.inputs[d].step
        graph.on(d, "outputs").embed(x.on(d), y.on(d), step, ids=device_ops.OUTPUTS)
    return y


def rms_norm(x: Tensor, w: Weight, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * w over the width (Zhang and Sennrich 2019). A PARTIAL x is reduced in the
    same kernel."""
    graph = x.graph
    if x.state.kind is Kind.PARTIAL and x.whole is None:
        x.whole, y = graph.all_reduce(x, w, eps)
        assert y is not None
        return y
    x = whole(x)
    y = graph.new(x.rows, x.width, split.rows_op("rms_norm", x.state), "rms_norm", holders_of(x))
    for on, source, weight, out in each(y, "rms_norm", x, w):
        on.rms_norm(source, weight, out, eps=eps)
    return y


def layer_norm(x: Tensor, w: Weight, b: Weight | None, eps: float) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * w + b over each head of x of w's width: of all of x, where it has
    one (Ba et al. 2016)."""
    x, graph, width = whole(x), x.graph, w.shape[0]
    y = graph.new(x.rows, x.width, split.per_head("layer_norm", x.state, width), "layer_norm", holders_of(x))
    for d in holders_of(y):
        bias, source = b.whole(d) if b else None, x.on(d)
        heads = source.reshape(x.rows * source.shape[1] // width, width)
        graph.on(d, "layer_norm").layer_norm(heads, w.whole(d), bias, y.on(d), eps=eps)
    return y


def center(x: Tensor) -> Tensor:
    """x - mean(x) over the width."""
    x = whole(x)
    y = x.graph.new(x.rows, x.width, split.rows_op("center", x.state), "center", holders_of(x))
    for on, source, out in each(y, "center", x):
        on.center(source, out)
    return y


def head_norm(x: Tensor, w: Weight | None, head_dim: int, eps: float) -> Tensor:
    """rms_norm of each head of x [rows, heads * head_dim] by itself, w [head_dim] or None for none."""
    x, graph = whole(x), x.graph
    y = graph.new(x.rows, x.width, split.per_head("head_norm", x.state, head_dim), "head_norm", holders_of(x))
    for d in holders_of(y):
        source, weight = x.on(d), w.whole(d) if w else None
        heads = source.reshape(x.rows * source.shape[1] // head_dim, head_dim)
        graph.on(d, "head_norm").rms_norm(heads, weight, y.on(d), eps=eps)
    return y


def linear(x: Tensor, w: Weight, bias: Weight | None = None) -> Tensor:
    """y = x w^T + bias, w [n_out, n_in], bias [n_out]."""
    x, graph = whole(x), x.graph
    name = w.name.rpartition(".")[0] or w.name
    state = split.linear(x.state, w.state)
    holders = holders_of(x) if state == MIRRORED else None
    y = graph.new(x.rows, w.shape[0], state, name.rpartition(".")[2], holders)
    biased: Sequence[int] = ()  # the devices that add the bias: only one writer if the sum is PARTIAL
    if bias:
        y.state = split.add_bias(y.state, bias.state)
        biased = y.state.writers[:1] or holders_of(y)
    for d, out in enumerate(y.views):
        if out is not None:
            _matmul(graph, d, w, x, out, bias.whole(d) if bias and d in biased else None)
    return y


def _matmul(graph: Graph, d: int, w: Weight, x: Tensor, out: View, bias: View | None = None) -> None:
    on, width = graph.on(d, w), out.shape[-1]
    operand = operand_of(x, d, device_ops.operand_type(on.limits, x.rows, w.dtype))
    for first, piece in w.pieces[d]:
        # A piece of the rows fills its own columns of every row of the result.
        n_rows, n = out.shape[0], piece.shape[0]
        target = View(out.buffer, out.offset + 4 * first, ((n_rows - 1) * width + n,)) if n < width else out
        own = bias and View(bias.buffer, bias.offset + 4 * first, (n,))
        on.mat(piece, operand, target, bias=own, y_stride=width)


def operand_of(x: Tensor, d: int, dtype: str) -> View:
    """x on device d as `dtype`, converted once for all the matrices that read it there."""
    if (d, dtype) not in x.converted:
        x.converted[d, dtype] = convert(x.graph, d, x.on(d), dtype)
    return x.converted[d, dtype]


def convert(graph: Graph, d: int, x: View, dtype: str) -> View:
    """Rows of any shape as `dtype`: x itself if it has that type, else a copy in new scratch."""
    if dtype == x.dtype:
        return x
    on = graph.on(d, f"as_{dtype}")
    y = View(Virtual(math.prod(x.shape[:-1]) * row_nbytes(dtype, x.shape[-1]), on.label), 0, x.shape, dtype)
    on.convert(x, y)
    return y


def logits(x: Tensor, w: Weight, softcap: float = 0.0) -> None:
    """Write x w^T into the host-visible region, each device for its own vocabulary rows. With `softcap` the
    logits are capped. If the graph has `top_k`, only the best candidates of each row are written."""
    x, graph = whole(x), x.graph
    split.linear(x.state, w.state)
    for d, inputs in enumerate(graph.inputs):
        if inputs.logits is None or not w.pieces[d]:
            continue
        shape = graph.n_outputs, inputs.logits.shape[1]
        out = (
            graph.scratch(shape, "capped")
            if graph.kind.wanted.top_k
            else View(inputs.logits.buffer, inputs.logits.offset, shape)
        )
        product = graph.scratch(shape, "logits") if softcap else out
        _matmul(graph, d, w, x, product)
        if softcap:
            graph.on(d, "softcap").softcap(product, out, c=softcap)
        if graph.kind.wanted.top_k:
            n_chunks = device_ops.top_k_chunks(graph.devices[d].limits, shape[1], graph.kind.wanted.top_k)[1]
            ids, values, sums = places(inputs.logits, graph.n_outputs, graph.kind.wanted.top_k, n_chunks)
            mask = None
            if graph.kind.masked:
                assert inputs.mask is not None
                mask = inputs.mask.rows(0, graph.n_outputs)
            _top_k(graph, d, out, ids, values, mask)
            if graph.kind.wanted.summed:
                chunk = device_ops.top_k_chunks(graph.devices[d].limits, shape[1], graph.kind.wanted.top_k)[0]
                graph.on(d, "log_sum_exp").log_sum_exp(out, sums, chunk=min(chunk, shape[1]))


def _top_k(graph: Graph, d: int, x: View, ids: View, values: View, mask: View | None) -> None:
    """The best candidates of each row of x: first those of each chunk, side by side, then the best of
    those."""
    on, (n_rows, n), k = graph.on(d, "top_k"), x.shape, graph.kind.wanted.top_k
    chunk, n_chunks = device_ops.top_k_chunks(on.limits, n, k)
    if n_chunks == 1:
        on.top_k(x, ids, values, mask=mask, chunk=n)
        return
    part_ids = replace(graph.scratch((n_rows, n_chunks, k), "top_k ids"), dtype="u32")
    part = graph.scratch((n_rows, n_chunks, k), "top_k values")
    on.top_k(x, part_ids, part, mask=mask, chunk=chunk)
    flat, places = part.reshape(n_rows, n_chunks * k), part_ids.reshape(n_rows, n_chunks * k)
    on.top_k(flat, ids, values, source=places, chunk=n_chunks * k)


def rope(x: Tensor, head_dim: int, table: str = "rope", half_split: bool = False) -> Tensor:
    """Rotate each head by the step's cos/sin rows (Su et al. 2021); pairs are adjacent or half a head
    apart."""
    graph = x.graph
    y = graph.new(x.rows, x.width, split.per_head("rope", x.state, head_dim), "rope", holders_of(x))
    for d, out in enumerate(y.views):
        if out is not None:
            heads = out.shape[1] // head_dim
            shape, full = (x.rows, heads, head_dim), graph.inputs[d].rope[table]
            cos_sin = View(full.buffer, full.offset, (x.rows, *full.shape[1:]))
            heads_in, heads_out = x.on(d).reshape(*shape), out.reshape(*shape)
            graph.on(d, "rope").rope(heads_in, cos_sin, heads_out, half_split=half_split)
    return y


def kv_store(x: Tensor, cache: Weight, cells: Weight) -> None:
    """Write the rows of x into `cache` [n_cells, width] at the cells of their positions."""
    split.elementwise("kv_store", x.state, cache.state)
    graph = x.graph
    for d, view in enumerate(x.views):
        if view is not None:
            step = graph.inputs[d].step
            graph.on(d, "kv_store").kv_store(view, cells.whole(d), cache.whole(d), step)


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
    softcap: float = 0.0,
    sinks: Weight | None = None,
) -> Tensor:
    """Causal grouped-query attention over the caches (Ainslie et al. 2023): softmax(scale q k^T) v, [rows,
    heads * head_dim_v].

    With `window`, a position sees that many positions, of which its own is the last. With `chunk`, it sees
    those from the last multiple of `chunk` up to its own. `softcap` c makes c * tanh(s / c) of a score.
    `sinks` [heads], split like the heads, add a logit per head to the denominator of the softmax alone (Xiao
    et al. 2024).
    """
    graph, rows, group = q.graph, q.rows, heads // kv_heads
    state = split.attention(q.state, k.state, v.state, heads, kv_heads, head_dim_k, head_dim_v)
    if sinks:
        split.per_head_weight("attention sinks", state, sinks.state, head_dim_v)
    y = graph.new(rows, heads * head_dim_v, state, "attention")
    for d, out in enumerate(y.views):
        if out is None:
            continue
        local = out.shape[1] // head_dim_v
        on, step = graph.on(d, "attention"), graph.inputs[d].step
        q_view, out = q.on(d).reshape(rows, local, head_dim_k), out.reshape(rows, local, head_dim_v)
        caches = k.whole(d), v.whole(d), cells.whole(d)
        # If a device's q heads are not whole groups, its first one may be in the middle of a kv head's group.
        first_head = state.ranges[d][0] // head_dim_v if state.ranges else 0
        how: dict[str, Any] = {"scale": scale, "group": group, "q_first": first_head % group}
        how |= {"window": window, "chunk": chunk, "softcap": softcap}
        own_sinks = sinks.whole(d) if sinks else None
        if graph.kind.mix is not Mix.PREFILL:
            # In a mixed step only the first rows decode, at most one per slot; attn_prefill writes the
            # others.
            n = rows if graph.kind.mix is Mix.DECODE else min(rows, caches[2].shape[0])
            n_kv = caches[0].shape[1] // head_dim_k
            tile_heads = device_ops.heads_by_units(on.limits, min(group, local), head_dim_k, head_dim_v)
            decode = on.attn_decode_coop if tile_heads else on.attn_decode
            tiled = {"tile_heads": tile_heads} if tile_heads else {}
            n_splits = device_ops.attn_splits(on.limits, n, local, n_kv, caches[2].shape[1], window, **tiled)
            q_n, out_n = q_view.rows(0, n), out.rows(0, n)
            if n_splits == 1:
                decode(q_n, *caches, out_n, step, sinks=own_sinks, **how)
            else:
                part = graph.scratch((n, local, n_splits, head_dim_v + 2), "attention parts")
                decode(q_n, *caches, part, step, **how)
                on.attn_combine(part, out_n, sinks=own_sinks)
        if graph.kind.mix is not Mix.DECODE:
            by_units = device_ops.attends_by_units(on.limits, rows, head_dim_k, head_dim_v)
            attend = on.attn_prefill_coop if by_units else on.attn_prefill
            attend(q_view, *caches, out, step, sinks=own_sinks, **how)
    return y


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up: SwiGLU (Shazeer 2020)."""
    return _glu("silu_mul", gate, up, "silu")


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, GELU in its tanh form: GeGLU (Shazeer 2020)."""
    return _glu("gelu_mul", gate, up, "gelu")


def gelu(x: Tensor) -> Tensor:
    """gelu(x) in its tanh form (Hendrycks and Gimpel 2016)."""
    return _glu("gelu", x, x, "gelu_alone")


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al. 2021, arXiv:2109.08668)."""
    return _glu("relu2", x, x, "relu2_alone")


def sigmoid_mul(gate: Tensor, x: Tensor) -> Tensor:
    """sigmoid(gate) * x: an output gate."""
    return _glu("sigmoid_mul", gate, x, "sigmoid")


def swiglu_oai(gate: Tensor, up: Tensor) -> Tensor:
    """g * sigmoid(1.702 g) * (u + 1), g = min(gate, 7) and u = up kept within +-7 (gpt-oss)."""
    return _glu("swiglu_oai", gate, up, "swiglu_oai")


def mul(a: Tensor, b: Tensor) -> Tensor:
    """a * b, value by value."""
    return _glu("mul", a, b, "none")


def _glu(name: str, gate: Tensor, up: Tensor, act: str) -> Tensor:
    gate, up = whole(gate), whole(up)
    holders = [d for d in holders_of(gate) if up.views[d] is not None]
    y = gate.graph.new(gate.rows, gate.width, split.elementwise(name, gate.state, up.state), name, holders)
    for on, left, right, out in each(y, name, gate, up):
        on.glu(left, right, out, act=act)
    return y


def scale(x: Tensor, c: float) -> Tensor:
    """c * x. A PARTIAL sum stays one: c times every share of it."""
    x = latest(x)
    y = x.graph.new(x.rows, x.width, x.state, "scale", holders_of(x))
    for on, source, out in each(y, "scale", x):
        on.scale(source, out, c=c)
    y.base = scale(x.base, c) if x.base else None
    return y


def softcap(x: Tensor, c: float) -> Tensor:
    """c * tanh(x / c): keeps values within +-c."""
    x = whole(x)
    y = x.graph.new(x.rows, x.width, split.elementwise("softcap", x.state), "softcap", holders_of(x))
    for on, source, out in each(y, "softcap", x):
        on.softcap(source, out, c=c)
    return y


def xielu(x: Tensor, alpha_p: float, alpha_n: float, beta: float, eps: float) -> Tensor:
    """A parabola above 0, below it an exponential beside a line (Huang and Schlag 2024, arXiv:2411.13010)."""
    x = whole(x)
    y = x.graph.new(x.rows, x.width, split.elementwise("xielu", x.state), "xielu", holders_of(x))
    for on, source, out in each(y, "xielu", x):
        on.xielu(source, out, alpha_p=alpha_p, alpha_n=alpha_n, beta=beta, eps=eps)
    return y


def gate_rows(gate: Tensor, x: Tensor) -> Tensor:
    """sigmoid(gate) * x, one gate [rows, 1] for a whole row of x. A PARTIAL sum stays one."""
    gate, x = whole(gate), latest(x)
    y = x.graph.new(x.rows, x.width, split.gate_rows(gate.state, x.state), "gate_rows", holders_of(x))
    for on, factor, source, out in each(y, "gate_rows", gate, x):
        on.gate_rows(factor, source, out)
    y.base = gate_rows(gate, x.base) if x.base else None
    return y


def columns(x: Tensor, begin: int, end: int) -> Tensor:
    """Columns begin..end of every row."""
    x, graph = whole(x), x.graph
    y = graph.new(x.rows, end - begin, split.rows_op("columns", x.state), "columns", holders_of(x))
    for on, source, out in each(y, "columns", x):
        on.columns(source, out, first=begin)
    return y


def add_vector(x: Tensor, v: Weight) -> Tensor:
    """x + v in every row, v [width] on every device. If x is a PARTIAL sum, v is added once: to its `base`,
    which is added after the reduce, if it has one, else to the share of one writer."""
    x, graph = latest(x), x.graph
    state = split.add_bias(x.state, v.state)
    if state.kind is Kind.PARTIAL and x.base:
        return Tensor(graph, x.rows, x.width, state, x.views, add_vector(x.base, v))
    y = graph.new(x.rows, x.width, state, "add_vector", state.writers[:1] or holders_of(x))
    if state.kind is Kind.PARTIAL:
        y.views = [x.views[d] if d != state.writers[0] else out for d, out in enumerate(y.views)]
    for d in state.writers[:1] or holders_of(y):
        graph.on(d, v).add_bias(x.on(d), v.whole(d), y.on(d))
    return y
