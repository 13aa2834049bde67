"""Ops of recurrent layers. A device that holds a key head also holds its value heads, so devices exchange
nothing."""

from __future__ import annotations

from collections.abc import Sequence

from vkbackend.buffer import View
from vkbackend.meta import split, split_recurrent
from vkbackend.meta.sums import holders_of
from vkbackend.meta.tensor import Tensor, TensorGraph, Weight
from vkbackend.ops import Recorder, delta_work
from vkbackend.step import Mix


def ssm_conv(x: Tensor, w: Weight, state: Weight, b: Weight | None = None, *, silu: bool = True) -> Tensor:
    """Return silu(c), where c is the causal depthwise convolution of x [rows, width] with w [width, d_conv],
    plus b [width]. Without `silu`, return c. `state` [n_cells, width * (d_conv - 1)] holds the d_conv - 1
    rows before x, and is updated to the last rows of x."""
    graph, d_conv = x.graph, w.shape[1]
    how = split_recurrent.ssm_conv(x.state, w.state, state.state, d_conv - 1)
    holders = [d for d in holders_of(x) if state.pieces[d]]
    y = graph.new(x.rows, x.width, split.add_bias(how, b.state) if b else how, "ssm_conv", holders)
    for d, out in enumerate(y.views):
        if out is not None:
            cells = state.whole(d)
            cells = cells.reshape(cells.shape[0], out.shape[1], d_conv - 1)
            bias, step = b.whole(d) if b else None, graph.inputs[d].step
            graph.on(d, "ssm_conv").ssm_conv(
                *(x.on(d), w.whole(d), bias, cells, out, step),
                silu=silu,
                row_states=graph.kind.mix is Mix.FEW,
            )
    return y


def delta_gates(a: Tensor, dt: Weight, decay: Weight, b: Tensor, bound: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return (softplus(a + dt) * decay, sigmoid(b)) per head. If `a` is wider than `b`, the first result
    contains a value per key channel. With `bound` < 0 the first result is
    bound * sigmoid(|decay| * (a + dt))."""
    graph = a.graph
    state = split_recurrent.delta_gates(a.state, dt.state, decay.state, b.state, a.width // b.width)
    g = graph.new(a.rows, a.width, state, "delta_g")
    beta = graph.new(b.rows, b.width, b.state, "delta_beta")
    for d, out in enumerate(g.views):
        if out is not None:
            on = graph.on(d, "delta_gates")
            on.delta_gates(a.on(d), dt.whole(d), decay.whole(d), b.on(d), out, beta.on(d), bound=bound)
    return g, beta


def delta_net(
    parts: Sequence[Tensor], g: Tensor, beta: Tensor, state: Weight, *, head_dim: int, tiled: bool, eps: float
) -> Tensor:
    """Apply the gated delta rule to q, k and v, given as three tensors or as segments of one. Returns [rows,
    heads * head_dim], split like v.

    The heads of q and k are first normalized to length 1. Consecutive value heads share a key head. If
    `tiled` is set, value head h uses key head h % n_k. `state` [n_cells, heads * head_dim * head_dim] gets
    each run's state after its last row.
    """
    graph, rows = beta.graph, beta.rows
    whole = len(parts) == 1
    states = [part.state for part in parts]
    how = split_recurrent.delta_net(states, g.state, beta.state, state.state, head_dim, g.width // beta.width)
    y = graph.new(rows, beta.width * head_dim, how, "delta_net")
    for d, out in enumerate(y.views):
        if out is None:
            continue
        on = graph.on(d, "delta_net")
        n_heads = out.shape[1] // head_dim
        if whole:
            source = parts[0].on(d)
            n_k = (source.shape[1] - out.shape[1]) // (2 * head_dim)
            unit = graph.scratch((rows, 2 * n_k, head_dim), "delta qk")
            q_stride, v_stride = 2 * n_k * head_dim, source.shape[1]
            on.l2_norm(source, unit, eps=eps, x_stride=v_stride)
            q, k, v = unit, _columns(unit, rows, n_k * head_dim), _columns(source, rows, q_stride)
        else:
            n_k = parts[0].on(d).shape[1] // head_dim
            q, k = (graph.scratch((rows, n_k, head_dim), "delta qk") for _ in range(2))
            for part, unit in zip(parts, (q, k), strict=False):
                on.l2_norm(part.on(d), unit, eps=eps)
            v, q_stride, v_stride = parts[2].on(d), n_k * head_dim, out.shape[1]
        cells = state.whole(d)
        _rule(
            graph, d, on, q, k, v,
            g.on(d).reshape(rows, n_heads, g.on(d).shape[1] // n_heads), beta.on(d),
            cells.reshape(cells.shape[0], n_heads, head_dim, head_dim), out.reshape(rows, n_heads, head_dim),
            n_k=n_k, tiled=tiled, q_stride=q_stride, v_stride=v_stride,
        )  # fmt: skip
    return y


def _rule(
    graph: TensorGraph, d: int, on: Recorder, q: View, k: View, v: View, g: View, beta: View, cells: View,
    out: View, *, n_k: int, tiled: bool, q_stride: int, v_stride: int,
) -> None:  # fmt: skip
    step, (rows, n_heads, size) = graph.inputs[d].step, out.shape
    if graph.kind.mix.decodes:
        on.delta_net(
            q, k, v, g, beta, cells, out, step, row_states=graph.kind.mix is Mix.FEW,
            n_k=n_k, tiled=tiled, q_stride=q_stride, v_stride=v_stride,
        )  # fmt: skip
        return
    work = graph.scratch(delta_work(rows, n_heads, size, kda=g.shape[2] > 1), "delta work")
    on.delta_chunk(q, k, v, g, beta, work, step, n_k=n_k, tiled=tiled, q_stride=q_stride, v_stride=v_stride)
    on.delta_scan(work, cells, out, step)


def _columns(x: View, rows: int, first: int) -> View:
    n = rows * (x.nbytes // 4 // rows) - first
    return View(x.buffer, x.offset + 4 * first, (n,))
