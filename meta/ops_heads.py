"""Ops on the heads of latent attention over N devices, of the same contract as ops.py: a device has what its
own heads need, and nothing is exchanged.
"""

from __future__ import annotations

from vkbackend import ops as device_ops
from vkbackend.meta import split
from vkbackend.meta.tensor import Tensor, Weight


def mat_heads(x: Tensor, w: Weight, n_heads: int) -> Tensor:
    """y[h] = W_h x[h] for every head of x [rows, n_heads * k]; w [n_heads * n, k] has the W_h in order."""
    graph, k = x.graph, w.shape[1]
    n = w.shape[0] // n_heads
    y = graph.new(x.rows, n_heads * n, split.mat_heads(x.state, w.state, k, n), "mat_heads")
    for d, out in enumerate(y.views):
        if out is not None:
            recording, limits, own = graph.recordings[d], graph.devices[d].limits, w.whole(d)
            count = own.shape[0] // n
            device_ops.mat_heads(recording, limits, own, x.on(d), out, n_heads=count, label=w.name)
    return y


def concat(a: Tensor, b: Tensor, n_a: int, n_b: int) -> Tensor:
    """Heads of n_a + n_b values: those of a, each followed by that of b."""
    graph = a.graph
    y = graph.new(a.rows, a.width + b.width, split.concat(a.state, b.state, n_a, n_b), "concat")
    for d, out in enumerate(y.views):
        if out is not None:
            left, right = (x.on(d).reshape(x.on(d).nbytes // 4 // n, n) for x, n in ((a, n_a), (b, n_b)))
            limits, label = graph.devices[d].limits, graph.label("concat")
            device_ops.concat(graph.recordings[d], limits, left, right, out, label=label)
    return y
