"""Ops on the heads of latent attention over N devices, of the same contract as ops.py: a device has what its
own heads need, and nothing is exchanged.
"""

from __future__ import annotations

from vkbackend import ops as device_ops
from vkbackend.errors import PlanError
from vkbackend.meta import split
from vkbackend.meta.split import Kind, Ranges, State
from vkbackend.meta.tensor import Tensor, Weight


def mat_heads(x: Tensor, w: Weight, n_heads: int) -> Tensor:
    """y[h] = W_h x[h] for every head of x [rows, n_heads * k]; w [n_heads * n, k] has the W_h in order."""
    graph, k = x.graph, w.shape[1]
    n = w.shape[0] // n_heads
    if w.state.axis != 0 or _heads(x.state, k) != _heads(w.state, n):
        raise PlanError(f"no rule for mat_heads of x {x.state}, w {w.state}")
    y = graph.new(x.rows, n_heads * n, split.split(1, w.state.ranges), "mat_heads")
    for d, out in enumerate(y.views):
        if out is not None:
            recording, limits, own = graph.recordings[d], graph.devices[d].limits, w.whole(d)
            count = own.shape[0] // n
            device_ops.mat_heads(recording, limits, own, x.on(d), out, n_heads=count, label=w.name)
    return y


def concat(a: Tensor, b: Tensor, n_a: int, n_b: int) -> Tensor:
    """Heads of n_a + n_b values: those of a, each followed by that of b."""
    graph, heads = a.graph, _heads(a.state, n_a)
    if heads != _heads(b.state, n_b):
        raise PlanError(f"no rule for concat of heads of {n_a} {a.state} and of {n_b} {b.state}")
    y = graph.new(a.rows, a.width + b.width, split.split(1, heads, [n_a + n_b]), "concat")
    for d, out in enumerate(y.views):
        if out is not None:
            left, right = (x.on(d).reshape(x.on(d).nbytes // 4 // n, n) for x, n in ((a, n_a), (b, n_b)))
            limits, label = graph.devices[d].limits, graph.label("concat")
            device_ops.concat(graph.recordings[d], limits, left, right, out, label=label)
    return y


def _heads(x: State, size: int) -> Ranges:
    """Heads of `size` values per device; none of a state that is not split between heads."""
    if x.kind is not Kind.SPLIT or x.segments or any(at % size for cut in x.ranges for at in cut):
        raise PlanError(f"no rule for heads of {size} of {x}")
    return tuple((begin // size, end // size) for begin, end in x.ranges)
