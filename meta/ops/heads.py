"""Ops on the heads of latent attention. Devices exchange nothing."""

from __future__ import annotations

from vkbackend.meta import split
from vkbackend.meta.sums import holders_of, whole
from vkbackend.meta.tensor import Tensor, Weight


def mat_heads(x: Tensor, w: Weight, n_heads: int) -> Tensor:
    """Return y[h] = W_h x[h] for each head h of x [rows, n_heads * k]. The weight w [n_heads * n, k] contains
    all W_h in order."""
    x, graph, k = whole(x), x.graph, w.shape[1]
    n = w.shape[0] // n_heads
    state = split.mat_heads(x.state, w.state, k, n)
    y = graph.new(x.rows, n_heads * n, state, "mat_heads", holders_of(x))
    for d, out in enumerate(y.views):
        if out is not None:
            matrices = w.whole(d)
            graph.on(d, w).mat_heads(matrices, x.on(d), out, n_heads=matrices.shape[0] // n)
    return y


def concat(a: Tensor, b: Tensor, n_a: int, n_b: int) -> Tensor:
    """Append a head of `b` to each head of `a`: the head with the same number, or the only head of `b`."""
    graph = a.graph
    width = a.width // n_a * (n_a + n_b)
    both = [d for d in holders_of(a) if b.views[d] is not None]
    y = graph.new(a.rows, width, split.concat(a.state, b.state, n_a, n_b), "concat", both)
    for d, out in enumerate(y.views):
        if out is not None:
            left, right = (x.on(d).reshape(x.on(d).nbytes // 4 // n, n) for x, n in ((a, n_a), (b, n_b)))
            graph.on(d, "concat").concat(left, right, out)
    return y
