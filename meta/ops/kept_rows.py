"""Ops that keep the rows of each slot's last positions for later steps. Every device keeps complete rows."""

from __future__ import annotations

from vkbackend.meta.split import MIRRORED
from vkbackend.meta.sums import whole
from vkbackend.meta.tensor import Tensor, TensorGraph, Weight


def rows_before(graph: TensorGraph, x: Tensor | None, kept: Weight) -> Tensor:
    """For each row, return the row before it in its sequence. It comes from x, or from `kept` [n_slots,
    n_kept, n] if the row is the first of a run. Without x, every run has one row."""
    before = whole(x) if x else None
    y = graph.new(graph.kind.n_rows, kept.shape[2], MIRRORED, "rows_before", graph.readers())
    for d in graph.readers():
        source = before.on(d) if before else None
        graph.on(d, "rows_before").rows_before(source, kept.whole(d), y.on(d), graph.inputs[d].step)
    return y


def keep_rows(x: Tensor, kept: Weight) -> None:
    """Store the rows of x in `kept` [n_slots, n_kept, n] by slot and position."""
    x, graph = whole(x), x.graph
    for d in graph.readers():
        graph.on(d, "keep_rows").keep_rows(x.on(d), kept.whole(d), graph.inputs[d].step)
