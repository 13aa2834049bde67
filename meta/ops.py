"""Ops on tensors over N devices: each derives its result's split state by rule and records itself per device.

A PARTIAL operand is made whole by the first op that needs the whole value; nothing here is called reduce, and
a model that uses these functions does not know how many devices there are. One function per op makes the file
long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from vkbackend import ops as device_ops
from vkbackend.buffer import View, Virtual
from vkbackend.formats import row_nbytes
from vkbackend.meta import split
from vkbackend.meta.split import MIRRORED, Kind
from vkbackend.meta.tensor import Graph, Tensor, Weight


def whole(x: Tensor) -> Tensor:
    """x itself, or the sum it stands for, on every device that works in this scope."""
    x = _latest(x)
    if x.state.kind is Kind.PARTIAL:
        x.whole = x.graph.all_reduce(x)[0]
        x = x.whole
    if x.state == MIRRORED and any(x.views[d] is None for d in x.graph.readers()):
        # Some device joins here: whoever holds the value hands it on, as a sum of one share.
        first = next(d for d, view in enumerate(x.views) if view is not None)
        views = [view if d == first else None for d, view in enumerate(x.views)]
        x.whole = x.graph.all_reduce(Tensor(x.graph, x.rows, x.width, split.partial((first,)), views))[0]
        x = x.whole
    return x


def _latest(x: Tensor) -> Tensor:
    """x as it was last made whole or handed on, if it was."""
    while x.whole is not None:
        x = x.whole
    return x


def _holders(x: Tensor) -> list[int]:
    return [d for d, view in enumerate(x.views) if view is not None]


def _each(y: Tensor, *operands: Tensor | Weight) -> Iterator[tuple[Any, ...]]:
    """(recording, limits, operand views..., y view) for every device that holds a share of y."""
    graph = y.graph
    for d, out in enumerate(y.views):
        if out is not None:
            views = [o.whole(d) if isinstance(o, Weight) else o.views[d] for o in operands]
            yield (graph.recordings[d], graph.devices[d].limits, *views, out)


def embed(graph: Graph, table: Weight) -> Tensor:
    """The rows of `table` [n_vocab, n_embd] that the step's tokens name; whole on every device."""
    y = graph.new(graph.n_rows, table.shape[1], MIRRORED, "embed")
    for d, (recording, device) in enumerate(zip(graph.recordings, graph.devices, strict=True)):
        for first, view in table.pieces[d]:
            out, step, label = y.on(d), graph.inputs[d].step, graph.label("embed")
            device_ops.embed(recording, device.limits, view, out, step, first=first, label=label)
    return y


def outputs(x: Tensor) -> Tensor:
    """The rows of x whose logits are wanted [n_outputs, width]."""
    x, graph = whole(x), x.graph
    y = graph.new(graph.n_outputs, x.width, split.rows_op("outputs", x.state), "outputs", _holders(x))
    for d in _holders(y):
        device_ops.embed(
            graph.recordings[d],
            graph.devices[d].limits,
            x.on(d),
            y.on(d),
            graph.inputs[d].step,
            ids=device_ops.OUTPUTS,
            label=graph.label("outputs"),
        )
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
    y = graph.new(x.rows, x.width, split.rows_op("rms_norm", x.state), "rms_norm", _holders(x))
    for recording, limits, source, weight, out in _each(y, x, w):
        device_ops.rms_norm(recording, limits, source, weight, out, eps=eps, label=graph.label("rms_norm"))
    return y


def head_norm(x: Tensor, w: Weight | None, head_dim: int, eps: float) -> Tensor:
    """rms_norm of each head of x [rows, heads * head_dim] by itself, w [head_dim] or None for none."""
    x, graph = whole(x), x.graph
    y = graph.new(x.rows, x.width, split.per_head("head_norm", x.state, head_dim), "head_norm", _holders(x))
    for d in _holders(y):
        recording, limits, source, out = graph.recordings[d], graph.devices[d].limits, x.on(d), y.on(d)
        weight = w.whole(d) if w else None
        heads = source.reshape(x.rows * source.shape[1] // head_dim, head_dim)
        device_ops.rms_norm(recording, limits, heads, weight, out, eps=eps, label=graph.label("head_norm"))
    return y


def linear(x: Tensor, w: Weight, bias: Weight | None = None) -> Tensor:
    """y = x w^T + bias, w [n_out, n_in], bias [n_out]."""
    x, graph = whole(x), x.graph
    name = w.name.rpartition(".")[0] or w.name
    state = split.linear(x.state, w.state)
    holders = _holders(x) if state == MIRRORED else None
    y = graph.new(x.rows, w.shape[0], state, name.rpartition(".")[2], holders)
    biased: Sequence[int] = ()  # the devices that add the bias: of a PARTIAL sum one writer
    if bias:
        y.state = split.add_bias(y.state, bias.state)
        biased = y.state.writers[:1] or _holders(y)
    for d, out in enumerate(y.views):
        if out is not None:
            _matmul(graph, d, w, x, out, bias.whole(d) if bias and d in biased else None)
    return y


def _matmul(graph: Graph, d: int, w: Weight, x: Tensor, out: View, bias: View | None = None) -> None:
    recording, limits, width = graph.recordings[d], graph.devices[d].limits, out.shape[-1]
    operand = operand_of(x, d, device_ops.operand_type(limits, x.rows, w.dtype))
    for first, piece in w.pieces[d]:
        # A piece of the rows fills its own columns of every row of the result.
        n_rows, n = out.shape[0], piece.shape[0]
        target = View(out.buffer, out.offset + 4 * first, ((n_rows - 1) * width + n,)) if n < width else out
        own = bias and View(bias.buffer, bias.offset + 4 * first, (n,))
        device_ops.mat(recording, limits, piece, operand, target, bias=own, y_stride=width, label=w.name)


def operand_of(x: Tensor, d: int, dtype: str) -> View:
    """x of that type on a device, converted once for all the matrices that read it there."""
    if (d, dtype) not in x.converted:
        x.converted[d, dtype] = convert(x.graph, d, x.on(d), dtype)
    return x.converted[d, dtype]


def convert(graph: Graph, d: int, x: View, dtype: str) -> View:
    """Rows of any shape as another type, in fresh scratch unless they have it."""
    if dtype == x.dtype:
        return x
    recording, limits, label = graph.recordings[d], graph.devices[d].limits, graph.label(f"as_{dtype}")
    y = View(Virtual(math.prod(x.shape[:-1]) * row_nbytes(dtype, x.shape[-1]), label), 0, x.shape, dtype)
    device_ops.convert(recording, limits, x, y, label=label)
    return y


def logits(x: Tensor, w: Weight, softcap: float = 0.0) -> None:
    """x w^T into the host-visible region, each device its own vocabulary rows; capped as by `softcap`. Of a
    graph with `top_k` only each row's best candidates get there."""
    x, graph = whole(x), x.graph
    split.linear(x.state, w.state)
    for d, inputs in enumerate(graph.inputs):
        if inputs.logits is None or not w.pieces[d]:
            continue
        recording, limits = graph.recordings[d], graph.devices[d].limits
        shape = graph.n_outputs, inputs.logits.shape[1]
        out = (
            graph.scratch(shape, "capped")
            if graph.top_k
            else View(inputs.logits.buffer, inputs.logits.offset, shape)
        )
        product = graph.scratch(shape, "logits") if softcap else out
        _matmul(graph, d, w, x, product)
        if softcap:
            device_ops.softcap(recording, limits, product, out, c=softcap, label=graph.label("softcap"))
        if graph.top_k:
            _top_k(graph, d, out, *candidates(inputs.logits, graph.n_outputs, graph.top_k))


def candidates(region: View, n_outputs: int, k: int) -> tuple[View, View]:
    """Where the host finds the places u32 and the values f32 [n_outputs, 1, k] of a device's best logits."""
    ids = View(region.buffer, region.offset, (n_outputs, 1, k), "u32")
    return ids, View(region.buffer, region.offset + ids.nbytes, (n_outputs, 1, k))


def _top_k(graph: Graph, d: int, x: View, ids: View, values: View) -> None:
    """The best of each row of x: of its chunks side by side, then of what those gave."""
    recording, limits, label = graph.recordings[d], graph.devices[d].limits, graph.label("top_k")
    (n_rows, n), k = x.shape, graph.top_k
    chunk, n_chunks = device_ops.top_k_chunks(limits, n, k)
    if n_chunks == 1:
        device_ops.top_k(recording, limits, x, ids, values, chunk=n, label=label)
        return
    part_ids = replace(graph.scratch((n_rows, n_chunks, k), "top_k ids"), dtype="u32")
    part = graph.scratch((n_rows, n_chunks, k), "top_k values")
    device_ops.top_k(recording, limits, x, part_ids, part, chunk=chunk, label=label)
    flat, places = part.reshape(n_rows, n_chunks * k), part_ids.reshape(n_rows, n_chunks * k)
    device_ops.top_k(recording, limits, flat, ids, values, source=places, chunk=n_chunks * k, label=label)


def rope(x: Tensor, head_dim: int, table: str = "rope", half_split: bool = False) -> Tensor:
    """Rotate each head by the step's cos/sin rows (Su et al. 2021); pairs are adjacent or half a head
    apart."""
    graph = x.graph
    y = graph.new(x.rows, x.width, split.per_head("rope", x.state, head_dim), "rope")
    for d, out in enumerate(y.views):
        if out is not None:
            heads = out.shape[1] // head_dim
            shape, full = (x.rows, heads, head_dim), graph.inputs[d].rope[table]
            cos_sin = View(full.buffer, full.offset, (x.rows, *full.shape[1:]))
            device_ops.rope(
                graph.recordings[d],
                graph.devices[d].limits,
                x.on(d).reshape(*shape),
                cos_sin,
                out.reshape(*shape),
                half_split=half_split,
                label=graph.label("rope"),
            )
    return y


def kv_store(x: Tensor, cache: Weight, cells: Weight) -> None:
    """Write the rows of x into `cache` [n_cells, width] at the cells of their positions."""
    split.elementwise("kv_store", x.state, cache.state)
    graph = x.graph
    for d, view in enumerate(x.views):
        if view is not None:
            device_ops.kv_store(
                graph.recordings[d],
                graph.devices[d].limits,
                view,
                cells.whole(d),
                cache.whole(d),
                graph.inputs[d].step,
                label=graph.label("kv_store"),
            )


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
    softcap: float = 0.0,
    sinks: Weight | None = None,
) -> Tensor:
    """Causal grouped-query attention over the caches (Ainslie et al. 2023): softmax(scale q k^T) v, [rows,
    heads * head_dim_v].

    With `window` a position sees that many, its own the last; `softcap` c makes c * tanh(s / c) of a score;
    `sinks` [heads], split like the heads, are one more logit each, in the denominator alone (Xiao et al.
    2024).
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
        recording, limits, step = graph.recordings[d], graph.devices[d].limits, graph.inputs[d].step
        q_view, out = q.on(d).reshape(rows, local, head_dim_k), out.reshape(rows, local, head_dim_v)
        caches = k.whole(d), v.whole(d), cells.whole(d)
        label = graph.label("attention")
        # Where q heads are not whole groups, the first of them may be in the middle of its kv head's group.
        first_head = state.ranges[d][0] // head_dim_v if state.ranges else 0
        how: dict[str, Any] = {"scale": scale, "group": group, "q_first": first_head % group, "label": label}
        how |= {"window": window, "softcap": softcap}
        own_sinks = sinks.whole(d) if sinks else None
        if rows > device_ops.MAX_VEC_ROWS:
            device_ops.attn_prefill(recording, limits, q_view, *caches, out, step, sinks=own_sinks, **how)
            continue
        n_kv = caches[0].shape[1] // head_dim_k
        n_splits = device_ops.attn_splits(limits, rows, local, n_kv, caches[2].shape[1], window)
        if n_splits == 1:
            device_ops.attn_decode(recording, limits, q_view, *caches, out, step, sinks=own_sinks, **how)
            continue
        part = graph.scratch((rows, local, n_splits, head_dim_v + 2), "attention parts")
        device_ops.attn_decode(recording, limits, q_view, *caches, part, step, **how)
        device_ops.attn_combine(recording, limits, part, out, sinks=own_sinks, label=label)
    return y


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up: SwiGLU (Shazeer 2020)."""
    return _glu("silu_mul", gate, up, "silu")


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, GELU in its tanh form: GeGLU (Shazeer 2020)."""
    return _glu("gelu_mul", gate, up, "gelu")


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
    holders = [d for d in _holders(gate) if up.views[d] is not None]
    y = gate.graph.new(gate.rows, gate.width, split.elementwise(name, gate.state, up.state), name, holders)
    for recording, limits, left, right, out in _each(y, gate, up):
        device_ops.glu(recording, limits, left, right, out, act=act, label=y.graph.label(name))
    return y


def scale(x: Tensor, c: float) -> Tensor:
    """c * x. A PARTIAL sum stays one: c times every share of it."""
    x = _latest(x)
    y = x.graph.new(x.rows, x.width, x.state, "scale", _holders(x))
    for recording, limits, source, out in _each(y, x):
        device_ops.scale(recording, limits, source, out, c=c, label=x.graph.label("scale"))
    y.base = scale(x.base, c) if x.base else None
    return y


def softcap(x: Tensor, c: float) -> Tensor:
    """c * tanh(x / c): keeps values within +-c."""
    x = whole(x)
    y = x.graph.new(x.rows, x.width, split.elementwise("softcap", x.state), "softcap", _holders(x))
    for recording, limits, source, out in _each(y, x):
        device_ops.softcap(recording, limits, source, out, c=c, label=x.graph.label("softcap"))
    return y


def gate_rows(gate: Tensor, x: Tensor) -> Tensor:
    """sigmoid(gate) * x, one gate [rows, 1] for a whole row of x. A PARTIAL sum stays one."""
    gate, x = whole(gate), _latest(x)
    y = x.graph.new(x.rows, x.width, split.gate_rows(gate.state, x.state), "gate_rows", _holders(x))
    for recording, limits, factor, source, out in _each(y, gate, x):
        device_ops.gate_rows(recording, limits, factor, source, out, label=x.graph.label("gate_rows"))
    y.base = gate_rows(gate, x.base) if x.base else None
    return y


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b. With a PARTIAL operand the sum stays PARTIAL until somebody needs the whole value."""
    state = split.add(a.state, b.state)
    if state.kind is not Kind.PARTIAL:
        return _elementwise("add", a, b)
    a, b = _latest(a), _latest(b)
    if a.state == MIRRORED and b.state == MIRRORED:
        return _elementwise("add", a, b)
    if MIRRORED in (a.state, b.state):
        base, x = (a, b) if a.state == MIRRORED else (b, a)
        return Tensor(x.graph, x.rows, x.width, x.state, x.views, _plus(base, x.base))
    y = a.graph.new(a.rows, a.width, state, "add")
    for d, out in enumerate(y.views):
        left, right, graph = a.views[d], b.views[d], a.graph
        if left is not None and right is not None and out is not None:
            recording, limits = graph.recordings[d], graph.devices[d].limits
            device_ops.add(recording, limits, left, right, out, label=graph.label("add"))
        else:
            y.views[d] = left or right
    y.base = _plus(a.base, b.base)
    return y


def together(*sums: Tensor) -> None:
    """Make several PARTIAL sums whole in one exchange, where they need one."""
    graph, width = sums[0].graph, sums[0].width
    parts = [x for x in map(_latest, sums) if x.state.kind is Kind.PARTIAL]
    writers = tuple(sorted({d for x in parts for d in x.state.writers}))
    if len(parts) < 2 or (len(writers) == 1 and writers == graph.readers()):
        return  # each is made whole where it is read
    joint = graph.new(sum(x.rows for x in parts), width, split.partial(writers), "together")
    begins = [0, *accumulate(x.rows for x in parts)]
    for d in writers:
        recording, limits, label = graph.recordings[d], graph.devices[d].limits, graph.label("together")
        some = next(x.on(d) for x in parts if x.views[d] is not None)
        for x, begin in zip(parts, begins, strict=False):
            out = _rows(joint.on(d), begin, x.rows)
            if (own := x.views[d]) is not None:
                recording.copy(own, out, label)
            else:  # zeros
                device_ops.scale(recording, limits, _rows(some, 0, x.rows), out, c=0.0, label=label)
    summed = graph.all_reduce(joint)[0]
    for x, begin in zip(parts, begins, strict=False):
        views = [view and _rows(view, begin, x.rows) for view in summed.views]
        x.whole = Tensor(graph, x.rows, width, MIRRORED, views)
        if x.base:
            x.whole = add(x.base, x.whole)


def _rows(view: View, begin: int, n: int) -> View:
    """Rows of a view of f32 rows."""
    width = view.shape[-1]
    return View(view.buffer, view.offset + 4 * begin * width, (n, width))


def columns(x: Tensor, begin: int, end: int) -> Tensor:
    """Columns begin..end of every row."""
    x, graph = whole(x), x.graph
    y = graph.new(x.rows, end - begin, split.rows_op("columns", x.state), "columns", _holders(x))
    for recording, limits, source, out in _each(y, x):
        device_ops.columns(recording, limits, source, out, first=begin, label=graph.label("columns"))
    return y


def add_vector(x: Tensor, v: Weight) -> Tensor:
    """x + v in every row, v [width] on every device. To a PARTIAL sum it is added once, to what is added to
    the sum anyway where there is such a thing."""
    x, graph = _latest(x), x.graph
    state = split.add_bias(x.state, v.state)
    if state.kind is Kind.PARTIAL and x.base:
        return Tensor(graph, x.rows, x.width, state, x.views, add_vector(x.base, v))
    y = graph.new(x.rows, x.width, state, "add_vector", state.writers[:1] or _holders(x))
    if state.kind is Kind.PARTIAL:
        y.views = [x.views[d] if d != state.writers[0] else out for d, out in enumerate(y.views)]
    for d in state.writers[:1] or _holders(y):
        recording, limits = graph.recordings[d], graph.devices[d].limits
        device_ops.add_bias(recording, limits, x.on(d), v.whole(d), y.on(d), label=v.name)
    return y


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return add(a, b) if a and b else a or b


def _elementwise(op: str, a: Tensor, b: Tensor) -> Tensor:
    graph, a, b = a.graph, _latest(a), _latest(b)
    if a.state == b.state == MIRRORED and any(None in (a.views[d], b.views[d]) for d in graph.readers()):
        a, b = whole(a), whole(b)
    holders = [d for d in _holders(a) if b.views[d] is not None]
    y = graph.new(a.rows, a.width, split.elementwise(op, a.state, b.state), op, holders)
    for recording, limits, left, right, out in _each(y, a, b):
        getattr(device_ops, op)(recording, limits, left, right, out, label=graph.label(op))
    return y
