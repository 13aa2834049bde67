"""Sums over devices. `whole` sums a PARTIAL value, `add` keeps a sum PARTIAL, and `together` reduces several
sums in one exchange."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from vkbackend.buffer import View
from vkbackend.meta import split
from vkbackend.meta.split import MIRRORED, Kind
from vkbackend.meta.tensor import Tensor, Weight


def whole(x: Tensor) -> Tensor:
    """Return x with its full value on every active device of this scope. A PARTIAL x is all-reduced."""
    x = latest(x)
    if x.state.kind is Kind.PARTIAL:
        x.whole = x.graph.all_reduce(x)[0]
        x = x.whole
    if x.state == MIRRORED and any(x.views[d] is None for d in x.graph.readers()):
        # An active device that lacks the value receives it by an all-reduce to which only the first device
        # adds a share.
        first = next(d for d, view in enumerate(x.views) if view is not None)
        views = [view if d == first else None for d, view in enumerate(x.views)]
        x.whole = x.graph.all_reduce(Tensor(x.graph, x.rows, x.width, split.partial((first,)), views))[0]
        x = x.whole
    return x


def same_bits(x: Tensor) -> Tensor:
    """Copy x from the first device to all active devices, so that all have the same bits. Drivers round norms
    differently."""
    x = whole(x)
    holders = holders_of(x)
    if len(holders) < 2:
        return x
    views = [view if d == holders[0] else None for d, view in enumerate(x.views)]
    shared = Tensor(x.graph, x.rows, x.width, split.partial((holders[0],)), views)
    return x.graph.all_reduce(shared, wire="f32")[0]


def latest(x: Tensor) -> Tensor:
    """Return the tensor that replaced x, or x if none did."""
    while x.whole is not None:
        x = x.whole
    return x


def holders_of(x: Tensor) -> list[int]:
    return [d for d, view in enumerate(x.views) if view is not None]


def each(y: Tensor, name: str, *operands: Tensor | Weight) -> Iterator[tuple[Any, ...]]:
    """Yield (recorder, operand views..., y view) for every device with a share of y."""
    graph = y.graph
    for d, out in enumerate(y.views):
        if out is not None:
            views = [o.whole(d) if isinstance(o, Weight) else o.views[d] for o in operands]
            yield (graph.on(d, name), *views, out)


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b. A PARTIAL result stays PARTIAL until an op needs the full sum."""
    state = split.add(a.state, b.state)
    if state.kind is not Kind.PARTIAL:
        return _add_values(a, b)
    a, b = latest(a), latest(b)
    if a.state == MIRRORED and b.state == MIRRORED:
        return _add_values(a, b)
    if MIRRORED in (a.state, b.state):
        base, x = (a, b) if a.state == MIRRORED else (b, a)
        return Tensor(x.graph, x.rows, x.width, x.state, x.views, _plus(base, x.base))
    y = a.graph.new(a.rows, a.width, state, "add")
    for d, out in enumerate(y.views):
        left, right, graph = a.views[d], b.views[d], a.graph
        if left is not None and right is not None and out is not None:
            graph.on(d, "add").add(left, right, out)
        else:
            y.views[d] = left or right
    y.base = _plus(a.base, b.base)
    return y


def _add_values(a: Tensor, b: Tensor) -> Tensor:
    graph, a, b = a.graph, latest(a), latest(b)
    if a.state == b.state == MIRRORED and any(None in (a.views[d], b.views[d]) for d in graph.readers()):
        a, b = whole(a), whole(b)
    holders = [d for d in holders_of(a) if b.views[d] is not None]
    y = graph.new(a.rows, a.width, split.elementwise("add", a.state, b.state), "add", holders)
    for on, left, right, out in each(y, "add", a, b):
        on.add(left, right, out)
    return y


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return add(a, b) if a and b else a or b


def together(*sums: Tensor) -> None:
    graph, width = sums[0].graph, sums[0].width
    parts = [x for x in map(latest, sums) if x.state.kind is Kind.PARTIAL]
    writers = tuple(sorted({d for x in parts for d in x.state.writers}))
    if len(parts) < 2 or (len(writers) == 1 and writers == graph.readers()):
        return
    joint = graph.new(sum(x.rows for x in parts), width, split.partial(writers), "together")
    begins = [0, *accumulate(x.rows for x in parts)]
    for d in writers:
        on = graph.on(d, "together")
        some = next(x.on(d) for x in parts if x.views[d] is not None)
        for x, begin in zip(parts, begins, strict=False):
            out = rows_between(joint.on(d), begin, x.rows)
            if (share := x.views[d]) is not None:
                on.copy(share, out)
            else:  # Without a share of x this device writes zeros.
                on.scale(rows_between(some, 0, x.rows), out, c=0.0)
    summed = graph.all_reduce(joint)[0]
    for x, begin in zip(parts, begins, strict=False):
        views = [view and rows_between(view, begin, x.rows) for view in summed.views]
        x.whole = Tensor(graph, x.rows, width, MIRRORED, views)
        if x.base:
            x.whole = add(x.base, x.whole)


def rows_between(view: View, begin: int, n: int) -> View:
    width = view.shape[-1]
    return View(view.buffer, view.offset + 4 * begin * width, (n, width))
