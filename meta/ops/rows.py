"""Norms, means and columns of rows, and rows that the host writes."""

from __future__ import annotations

from vkbackend.buffer import View
from vkbackend.meta import split
from vkbackend.meta.split import MIRRORED, Kind
from vkbackend.meta.sums import each, holders_of, whole
from vkbackend.meta.tensor import Tensor, TensorGraph, Weight


def rms_norm(x: Tensor, w: Weight, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * w (Zhang and Sennrich 2019). For a PARTIAL x, the same kernel also
    sums x over the devices."""
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
    """Return (x - mean(x)) / sqrt(var(x) + eps) * w + b for each head of w's width (Ba et al. 2016)."""
    x, graph, width = whole(x), x.graph, w.shape[0]
    y = graph.new(x.rows, x.width, split.per_head("layer_norm", x.state, width), "layer_norm", holders_of(x))
    for d in holders_of(y):
        bias, source = b.whole(d) if b else None, x.on(d)
        heads = source.reshape(x.rows * source.shape[1] // width, width)
        graph.on(d, "layer_norm").layer_norm(heads, w.whole(d), bias, y.on(d), eps=eps)
    return y


def center(x: Tensor) -> Tensor:
    x = whole(x)
    y = x.graph.new(x.rows, x.width, split.rows_op("center", x.state), "center", holders_of(x))
    for on, source, out in each(y, "center", x):
        on.center(source, out)
    return y


def head_norm(x: Tensor, w: Weight | None, head_dim: int, eps: float) -> Tensor:
    """Return the RMS norm of each head of x [rows, heads * head_dim], with w [head_dim] or None."""
    x, graph = whole(x), x.graph
    y = graph.new(x.rows, x.width, split.per_head("head_norm", x.state, head_dim), "head_norm", holders_of(x))
    for d in holders_of(y):
        source, weight = x.on(d), w.whole(d) if w else None
        heads = source.reshape(x.rows * source.shape[1] // head_dim, head_dim)
        graph.on(d, "head_norm").rms_norm(heads, weight, y.on(d), eps=eps)
    return y


def copy(x: Tensor) -> Tensor:
    x = whole(x)
    y = x.graph.new(x.rows, x.width, split.rows_op("copy", x.state), "copy", holders_of(x))
    for on, source, out in each(y, "copy", x):
        on.copy(source, out)
    return y


def columns(x: Tensor, begin: int, end: int) -> Tensor:
    x, graph = whole(x), x.graph
    y = graph.new(x.rows, end - begin, split.columns(x.state, x.width, end - begin), "columns", holders_of(x))
    for on, source, out in each(y, "columns", x):
        on.columns(source, out, first=begin)
    return y


def host_rows(graph: TensorGraph, table: str) -> Tensor:
    """Return the step's rows of a table that the host writes (StepShape.rope_widths), on every device."""
    rows, views, width = graph.kind.n_rows, list[View | None](), 0
    for inputs in graph.inputs:
        full = inputs.rope[table]
        width = full.nbytes // 4 // full.shape[0]
        views.append(View(full.buffer, full.offset, (rows, width)))
    return Tensor(graph, rows, width, MIRRORED, views)


def pool_rows(x: Tensor, count: int) -> Tensor:
    """Return the mean of each `count` consecutive rows, [rows / count, width]."""
    x = whole(x)
    n = x.rows // count
    y = x.graph.new(n, x.width, split.rows_op("pool_rows", x.state), "pool_rows", holders_of(x))
    for on, source, out in each(y, "pool_rows", x):
        on.pool_rows(source, out, count=count)
    return y


def joined_rows(x: Tensor, n: int) -> Tensor:
    """Without a copy, return [rows / n, n * width], where a row consists of n consecutive rows of x."""
    x = whole(x)
    assert x.rows % n == 0, (x.rows, n)
    state = split.rows_op("joined_rows", x.state)
    shape = x.rows // n, n * x.width
    return Tensor(x.graph, *shape, state, [view and view.reshape(*shape) for view in x.views])
