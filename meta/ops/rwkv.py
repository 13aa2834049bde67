"""Ops of RWKV-7 (vkbackend/ops/rwkv.py). Every device has the complete rows of x and the complete state of
token shifts, but only its own heads of all other tensors."""

from __future__ import annotations

from vkbackend.buffer import View
from vkbackend.meta import split, split_recurrent
from vkbackend.meta.split import MIRRORED
from vkbackend.meta.sums import holders_of, whole
from vkbackend.meta.tensor import Tensor, Weight
from vkbackend.step import Mix


def token_shift(x: Tensor, mu: Weight, state: Weight) -> list[Tensor]:
    """Return x + mu[s] * (before - x) for each row of mu [n, width], where `before` is the row before each
    row of x [rows, width]. `state` [n_cells, width] gets each run's last row."""
    x, graph = whole(x), x.graph
    split_recurrent.token_shift(x.state, mu.state, state.state)
    (n, width), rows = mu.shape, x.rows
    views: list[View | None] = [None] * graph.n
    for d in holders_of(x):
        if state.state.count(d):
            views[d] = out = graph.scratch((n, rows, width), "token_shift")
            step, row_states = graph.inputs[d].step, graph.kind.mix is Mix.FEW
            on = graph.on(d, "token_shift")
            on.token_shift(x.on(d), mu.whole(d), state.whole(d), out, step, row_states=row_states)
    return [
        Tensor(graph, rows, width, MIRRORED, [view and _mix(view, s, rows, width) for view in views])
        for s in range(n)
    ]


def _mix(view: View, s: int, rows: int, width: int) -> View:
    return View(view.buffer, view.offset + 4 * s * rows * width, (rows, width))


def wkv_keys(
    k: Tensor, rate: Tensor, removal: Weight, replacement: Weight, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (key, removed, added) for k [rows, heads * head_dim], each split like k."""
    graph = k.graph
    how = split_recurrent.wkv("wkv_keys", (k.state, rate.state), (removal.state, replacement.state), head_dim)
    results = tuple(graph.new(k.rows, k.width, how, f"wkv_{name}") for name in ("key", "removed", "added"))
    key, removed, added = results
    for d in holders_of(key):
        shape = k.rows, key.on(d).shape[1] // head_dim, head_dim
        graph.on(d, "wkv_keys").wkv_keys(
            k.on(d),
            rate.on(d),
            removal.whole(d),
            replacement.whole(d),
            key.on(d).reshape(*shape),
            removed.on(d),
            added.on(d),
        )
    return key, removed, added


def wkv(
    r: Tensor,
    decay: Tensor,
    key: Tensor,
    v: Tensor,
    removed: Tensor,
    added: Tensor,
    state: Weight,
    head_dim: int,
) -> Tensor:
    """Return the scan of r, key and v [rows, heads * head_dim], split like r. `state` [n_cells, heads *
    head_dim * head_dim] gets each run's state after its last row."""
    graph, parts = r.graph, (r, decay, key, v, removed, added)
    how = split_recurrent.wkv("wkv", [part.state for part in parts], (), head_dim, state.state)
    y = graph.new(r.rows, r.width, how, "wkv")
    for d in holders_of(y):
        n_heads, cells = y.on(d).shape[1] // head_dim, state.whole(d)
        graph.on(d, "wkv").wkv(
            r.on(d),
            decay.on(d),
            key.on(d),
            v.on(d),
            removed.on(d),
            added.on(d),
            cells.reshape(cells.shape[0], n_heads, head_dim, head_dim),
            y.on(d).reshape(r.rows, n_heads, head_dim),
            graph.inputs[d].step,
            row_states=graph.kind.mix is Mix.FEW,
        )
    return y


def wkv_norm(
    x: Tensor,
    r: Tensor,
    key: Tensor,
    v: Tensor,
    bonus: Weight,
    w: Weight,
    b: Weight,
    head_dim: int,
    eps: float,
) -> Tensor:
    """Return, for each head of x [rows, heads * head_dim], its layer norm * w + b + v * sum(r * key * bonus).
    The sum is over the head."""
    graph, weights = x.graph, (bonus.state, w.state, b.state)
    how = split_recurrent.wkv("wkv_norm", [part.state for part in (x, r, key, v)], weights, head_dim)
    y = graph.new(x.rows, x.width, how, "wkv_norm")
    for d in holders_of(y):
        graph.on(d, "wkv_norm").wkv_norm(
            x.on(d),
            r.on(d),
            key.on(d),
            v.on(d),
            bonus.whole(d),
            w.whole(d),
            b.whole(d),
            y.on(d).reshape(x.rows, y.on(d).shape[1] // head_dim, head_dim),
            eps=eps,
        )
    return y


def share(x: Tensor, like: Tensor) -> Tensor:
    """Return each device's columns of x, split like `like`."""
    x, graph = whole(x), x.graph
    how = split.share(x.state, like.state)
    if how == MIRRORED:
        return x
    y = graph.new(x.rows, x.width, how, "share")
    for d in holders_of(y):
        graph.on(d, "share").columns(x.on(d), y.on(d), first=how.ranges[d][0])
    return y
