"""Ops on a residual of several streams (vkbackend/ops/streams.py), complete on every device."""

from __future__ import annotations

from vkbackend.meta import split
from vkbackend.meta.ops import elementwise
from vkbackend.meta.ops.elementwise import add_vector
from vkbackend.meta.ops.heads import concat
from vkbackend.meta.ops.rows import columns
from vkbackend.meta.sums import each, holders_of, whole
from vkbackend.meta.tensor import Tensor, Weight


def streams_of(x: Tensor, a: Tensor) -> Tensor:
    """Return streams of n values, [rows, n + width of a]. The first stream is x [rows, n]. Each further
    stream is n values of a, scaled to the root mean square of x."""
    return _made("streams_of", whole(x), whole(a))


def add_to_others(x: Tensor, a: Tensor) -> Tensor:
    return _made("streams_add", whole(x), whole(a))


def _made(name: str, x: Tensor, a: Tensor) -> Tensor:
    width = x.width + a.width if name == "streams_of" else x.width
    y = x.graph.new(x.rows, width, _everywhere(name, x, a), name, _holders(x, a))
    for on, first, second, out in each(y, name, x, a):
        getattr(on, name)(first, second, out)
    return y


def predict(x: Tensor, routed: Tensor, w: Weight, scale: float) -> Tensor:
    """Add a weighted sum of all streams to each stream of x. The weights are w times tanh(scale * routed)."""
    x, routed = whole(x), whole(routed)
    state, holders = _everywhere("predict", x, routed), _holders(x, routed)
    y = x.graph.new(x.rows, x.width, state, "streams_predict", holders)
    for on, values, modes, factors, out in each(y, "streams_predict", x, routed, w):
        on.streams_predict(values, modes, factors, out, scale=scale)
    return y


def correct(
    x: Tensor, a: Tensor, routed: Tensor, w: Weight, g: Weight, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the streams x_i + (1 + c_i) * (a - x_0), where c is w times tanh(scale * routed). The second
    result is stream 0 of the first, times g."""
    x, a, routed, graph = whole(x), whole(a), whole(routed), x.graph
    state, holders = _everywhere("correct", x, a, routed), _holders(x, a, routed)
    y = graph.new(x.rows, x.width, state, "streams_correct", holders)
    z = graph.new(x.rows, a.width, state, "stream", holders)
    for on, *views, out in each(y, "streams_correct", x, a, routed, w, g, z):
        on.streams_correct(*views[:5], out, views[5], scale=scale)
    return y, z


def copies(x: Tensor, m: int) -> Tensor:
    """Return [rows, m * n], m copies of x [rows, n] side by side."""
    y = x
    for _ in range(m - 1):
        y = concat(y, x, y.width, x.width)
    return y


def mix(x: Tensor, mixes: Tensor, scale: Weight, base: Weight, m: int, eps: float) -> Tensor:
    """Return the sum of the m streams of x, weighted by sigmoid(scale[0] * mixes + base) + eps."""
    x, mixes = whole(x), whole(mixes)
    state, holders = _everywhere("mix", x, mixes), _holders(x, mixes)
    y = x.graph.new(x.rows, x.width // m, state, "streams_mix", holders)
    for on, *views, out in each(y, "streams_mix", x, mixes, scale, base):
        on.streams_mix(*views, out, eps=eps)
    return y


def attend(x: Tensor, a: Tensor, w: Weight, eps: float) -> Tensor:
    """Return the sum of the streams of x and of the stream `a`, weighted by the softmax of their scores. A
    stream's score is the dot product of w and the stream, scaled to a root mean square of 1."""
    x, a = whole(x), whole(a)
    state, holders = _everywhere("attend", x, a), _holders(x, a)
    y = a.graph.new(a.rows, a.width, state, "streams_attend", holders)
    for on, *views, out in each(y, "streams_attend", x, a, w):
        on.streams_attend(*views, out, eps=eps)
    return y


def spread(
    x: Tensor, a: Tensor, mixes: Tensor, scale: Weight, base: Weight, gain: float, eps: float
) -> Tensor:
    """Add `a` to each stream of x, weighted by gain * sigmoid(scale[1] * mixes + base) + eps."""
    x, a, mixes = whole(x), whole(a), whole(mixes)
    state, holders = _everywhere("spread", x, a, mixes), _holders(x, a, mixes)
    y = x.graph.new(x.rows, x.width, state, "streams_spread", holders)
    for on, *views, out in each(y, "streams_spread", x, a, mixes, scale, base):
        on.streams_spread(*views, out, gain=gain, eps=eps)
    return y


def transport(
    x: Tensor, a: Tensor, mixes: Tensor, scale: Weight, base: Weight, n_turns: int, eps: float
) -> Tensor:
    """Mix the streams of x by a matrix whose rows and columns sum to 1. To each stream, add 2 *
    sigmoid(scale[1] * mixes + base) * a."""
    x, a, mixes = whole(x), whole(a), whole(mixes)
    state, holders = _everywhere("transport", x, a, mixes), _holders(x, a, mixes)
    y = x.graph.new(x.rows, x.width, state, "streams_sinkhorn", holders)
    for on, *views, out in each(y, "streams_sinkhorn", x, a, mixes, scale, base):
        on.streams_sinkhorn(*views, out, n_turns=n_turns, eps=eps)
    return y


def gate(x: Tensor, k: Tensor, a: Tensor) -> Tensor:
    """For each stream of x, return `a` times sigmoid(root(x . k / sqrt(n))). A stream of x and k has n
    values, and the root keeps the sign."""
    x, k, a = whole(x), whole(k), whole(a)
    state, holders = _everywhere("gate", x, k, a), _holders(x, k, a)
    y = x.graph.new(x.rows, x.width, state, "streams_gate", holders)
    for on, *views, out in each(y, "streams_gate", x, k, a):
        on.streams_gate(*views, out)
    return y


def mean(x: Tensor, n: int) -> Tensor:
    """Return the mean of the streams of x, which have n values each."""
    m, total = x.width // n, columns(x, 0, n)
    for i in range(1, m):
        total = total + columns(x, i * n, (i + 1) * n)
    return elementwise.scale(total, 1 / m)


def add_to_all(x: Tensor, v: Weight) -> Tensor:
    x, n = whole(x), v.shape[0]
    rows = x.rows * (x.width // n)
    seen = Tensor(x.graph, rows, n, x.state, [view and view.reshape(rows, n) for view in x.views])
    y = add_vector(seen, v)
    return Tensor(x.graph, x.rows, x.width, y.state, [v and v.reshape(x.rows, x.width) for v in y.views])


def _holders(*operands: Tensor) -> list[int]:
    return sorted(set.intersection(*(set(holders_of(x)) for x in operands)))


def _everywhere(op: str, *operands: Tensor) -> split.State:
    for x in operands:
        state = split.rows_op(op, x.state)
    return state
