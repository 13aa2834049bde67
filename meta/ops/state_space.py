"""Ops of state space layers. Every device scans its own heads, and holds B and C of their groups. If several
devices hold heads of a group, the group's norm exchanges one sum of squares per row.
"""

from __future__ import annotations

from vkbackend.buffer import View
from vkbackend.meta import split, split_recurrent
from vkbackend.meta.sums import holders_of, whole
from vkbackend.meta.tensor import Tensor, TensorGraph, Weight
from vkbackend.step import Mix


def ssm_scan(
    x: Tensor,
    bc: Tensor,
    dt: Tensor,
    bias: Weight,
    a: Weight,
    d: Weight,
    state: Weight,
    *,
    head_dim: int,
    n_group: int,
) -> Tensor:
    """Return Mamba-2's scan of x [rows, heads * head_dim] (vkbackend/ops/state_space.py), split like x.

    `bc` holds B of all groups, then C of all groups. The shapes are dt [rows, heads] and bias, a, d [heads].
    `state` [n_cells, heads * n * head_dim] gets each run's state after its last row.
    """
    graph, rows, n_head = x.graph, x.rows, dt.width
    n, group = bc.width // (2 * n_group), n_head // n_group
    for w in (bias, a, d):
        split.add_bias(dt.state, w.state)
    how = split_recurrent.ssm_scan(x.state, bc.state, dt.state, state.state, (head_dim, n, group))
    y = graph.new(rows, x.width, how, "ssm_scan")
    for r, out in enumerate(y.views):
        if out is None:
            continue
        heads, groups, cells = out.shape[1] // head_dim, bc.on(r).shape[1] // (2 * n), state.whole(r)
        shape = rows, heads, head_dim
        graph.on(r, "ssm_scan").ssm_scan(
            x.on(r).reshape(*shape),
            bc.on(r).reshape(rows, 2, groups, n),
            dt.on(r),
            bias.whole(r),
            a.whole(r),
            d.whole(r),
            cells.reshape(cells.shape[0], heads, n, head_dim),
            out.reshape(*shape),
            graph.inputs[r].step,
            group=group,
            first=how.ranges[r][0] // head_dim % group,
            row_states=graph.kind.mix is Mix.FEW,
        )
    return y


def selective_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Weight, d: Weight, state: Weight
) -> Tensor:
    """Return Mamba-1's scan of x [rows, channels] (vkbackend/ops/state_space.py), split like x.

    The shapes are dt [rows, channels], b and c [rows, n], a [channels, n] and d [channels]. `state` [n_cells,
    channels * n] gets each run's state after its last row.
    """
    graph, n = x.graph, a.shape[1]
    b, c = whole(b), whole(c)
    how = split_recurrent.selective_scan(
        x.state, dt.state, (b.state, c.state), (a.state, d.state), state.state, n
    )
    y = graph.new(x.rows, x.width, how, "selective_scan")
    for r in holders_of(y):
        cells, out = state.whole(r), y.on(r)
        graph.on(r, "selective_scan").selective_scan(
            x.on(r),
            dt.on(r),
            b.on(r),
            c.on(r),
            a.whole(r),
            d.whole(r),
            cells.reshape(cells.shape[0], out.shape[1], n),
            out,
            graph.inputs[r].step,
            row_states=graph.kind.mix is Mix.FEW,
        )
    return y


def gated_norm(gate: Tensor, x: Tensor, w: Weight, n_group: int, eps: float) -> Tensor:
    """Divide the columns of silu(gate) * x into n_group equal groups, and return each group's RMS norm times
    w [width]."""
    graph, size = x.graph, x.width // n_group
    how = split.elementwise("gated_norm", gate.state, x.state)
    apart = split.group_norm(x.state, w.state, size)
    y = graph.new(x.rows, x.width, how, "gated_norm")
    views = {}
    for d in holders_of(y):
        width = x.on(d).shape[1]
        views[d] = graph.scratch((x.rows, width // size if apart else n_group), "group_squares")
        first = 0 if apart else how.ranges[d][0]
        graph.on(d, "group_squares").group_squares(gate.on(d), x.on(d), views[d], group=size, first=first)
    if not apart:
        views = _summed(graph, views, x.rows * n_group)
    for d in holders_of(y):
        first = 0 if apart else how.ranges[d][0]
        sums = views[d].reshape(x.rows, views[d].nbytes // (4 * x.rows))
        graph.on(d, "gated_norm").group_norm(
            gate.on(d), x.on(d), sums, w.whole(d), y.on(d), group=size, first=first, eps=eps
        )
    return y


def _summed(graph: TensorGraph, shares: dict[int, View], n: int) -> dict[int, View]:
    views = [shares[d].reshape(n, 1) if d in shares else None for d in range(graph.n)]
    sums = Tensor(graph, n, 1, split.partial(sorted(shares)), views)
    # The exchange uses f32, as in wide_norms.
    total = graph.all_reduce(sums, wire="f32")[0]
    return {d: total.on(d) for d in shares}
