"""Ops over the full width of split tensors. Devices exchange one or two sums per row."""

from __future__ import annotations

from collections.abc import Sequence

from vkbackend.meta import split
from vkbackend.meta.split import MIRRORED, Kind
from vkbackend.meta.sums import each, holders_of, rows_between, whole
from vkbackend.meta.tensor import Tensor, Weight


def wide_norms(parts: Sequence[tuple[Tensor, Weight]], eps: float) -> list[Tensor]:
    """Return x / sqrt(mean(x^2) + eps) * w for each x [rows, width] and w [width], with one exchange for all
    tensors."""
    graph, rows = parts[0][0].graph, parts[0][0].rows
    states = [split.wide_norm(x.state, w.state) for x, w in parts]
    results = [
        graph.new(rows, x.width, state, "wide_norm") for (x, _), state in zip(parts, states, strict=True)
    ]
    holders = holders_of(parts[0][0])
    if len(holders) == 1:
        [d] = holders
        for (x, w), y in zip(parts, results, strict=True):
            graph.on(d, "wide_norm").rms_norm(x.on(d), w.whole(d), y.on(d), eps=eps)
        return results
    shares = graph.new(len(parts) * rows, 1, split.partial(holders), "group_squares")
    for d in holders:
        for i, (x, _) in enumerate(parts):
            out = rows_between(shares.on(d), i * rows, rows)
            where = {"group": x.width, "first": x.state.ranges[d][0], "skip": _counted_before(x, d)}
            graph.on(d, "group_squares").group_squares(None, x.on(d), out, **where)
    # The exchange uses f32, because a rounding error would change the complete row.
    sums = graph.all_reduce(shares, wire="f32")[0]
    for i, ((x, w), y) in enumerate(zip(parts, results, strict=True)):
        for d in holders:
            squares = rows_between(sums.on(d), i * rows, rows)
            on, first = graph.on(d, "wide_norm"), x.state.ranges[d][0]
            on.group_norm(None, x.on(d), squares, w.whole(d), y.on(d), group=x.width, first=first, eps=eps)
    return results


def gaussian_topk(x: Tensor, c: float) -> Tensor:
    """Return max(x - mean - c * deviation, 0), with the mean and standard deviation of the complete row.
    Roughly, only a row's largest values remain above 0."""
    graph, x = x.graph, whole(x)
    y = graph.new(
        x.rows, x.width, split.elementwise("gaussian_topk", x.state), "gaussian_topk", holders_of(x)
    )
    apart = x.state.kind is Kind.SPLIT and len(holders_of(x)) > 1
    state = split.partial(holders_of(x)) if apart else MIRRORED
    moments = graph.new(x.rows, 2, state, "row_moments", holders_of(x))
    for on, source, out in each(moments, "row_moments", x):
        on.row_moments(source, out)
    if apart:
        moments = graph.all_reduce(moments, wire="f32")[0]
    for on, source, known, out in each(y, "gaussian_topk", x, moments):
        on.gaussian_topk(source, known, out, width=x.width, c=c)
    return y


def _counted_before(x: Tensor, d: int) -> int:
    """Return how many of device d's first columns an earlier device also holds. Two devices may hold the same
    kv head."""
    assert x.state.kind is Kind.SPLIT
    begin, end = x.state.ranges[d]
    return min(max([begin, *(e for b, e in x.state.ranges[:d] if e > b)]), end) - begin
