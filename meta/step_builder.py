"""Build a step's recordings: trace the model's graph, fuse ops, sort them by depth, and interleave the ops of
both halves of the rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NamedTuple

from vkbackend import env
from vkbackend.buffer import View, aligned
from vkbackend.collector import collection_paused
from vkbackend.meta.graph import Graph
from vkbackend.meta.reduce import Provider, Reduce
from vkbackend.meta.step_kind import StepKind
from vkbackend.meta.streams import Fetch
from vkbackend.meta.tensor import Inputs
from vkbackend.ops.fusion import fuse
from vkbackend.recording import Recording, interleave
from vkbackend.runtime import Device
from vkbackend.schedule import by_depth

Build = Callable[[Graph], None]


class Built(NamedTuple):
    recordings: list[Recording]
    meetings: list[Reduce | Fetch | None]
    values: dict[str, list[View | None]]


@dataclass(frozen=True, slots=True)
class StepBuilder:
    devices: Sequence[Device]
    inputs: Sequence[Inputs]
    provider: Provider | None
    build: Build
    active: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    reduce_type: str = "auto"

    @collection_paused()
    def recorded(
        self, kind: StepKind, skipped: Collection[int] = (), check: Callable[[], None] = lambda: None
    ) -> Built:
        """Record a step without the `skipped` layers. If the step has two halves, their segments alternate,
        so that one half computes during the other half's exchanges. Then a segment waits not for the latest
        exchange, but only for the one before."""
        graphs = self.graphs(kind, skipped, check)
        recordings = [ordered(graphs, d) for d in range(len(self.devices))]
        if not kind.halves:
            return Built(recordings, list(graphs[0].meetings), graphs[0].values)
        first, second = graphs
        pairs = zip_longest([*first.meetings, None], [*second.meetings, None])
        meetings: list[Reduce | Fetch | None] = [meeting for pair in pairs for meeting in pair][:-1]
        values = first.values | {f"second half {name}": views for name, views in second.values.items()}
        return Built(recordings, meetings, values)

    def graphs(
        self, kind: StepKind, skipped: Collection[int] = (), check: Callable[[], None] = lambda: None
    ) -> list[Graph]:
        """Return the graphs that the model records: one graph, or one per half."""
        how = frozenset(skipped), check
        if not kind.halves:
            return [self._graph(self.inputs, kind, *how)]
        half = kind._replace(n_rows=kind.n_rows // 2, halves=False)
        later = [second_half(inputs, kind) for inputs in self.inputs]
        first = self._graph(self.inputs, first_half(kind), *how)
        return [first, self._graph(later, half, *how, lane=1)]

    def _graph(
        self,
        inputs: Sequence[Inputs],
        kind: StepKind,
        skipped: Collection[int],
        check: Callable[[], None],
        lane: int = 0,
    ) -> Graph:
        shape = self.active, self.reduce_type, lane, skipped, check
        graph = Graph(self.devices, inputs, self.provider, kind, *shape)
        graph.begin()
        self.build(graph)
        return graph


def first_half(kind: StepKind) -> StepKind:
    return kind._replace(n_rows=kind.n_rows // 2, n_outputs=0, halves=False)


def second_half(inputs: Inputs, kind: StepKind) -> Inputs:
    """Return the inputs of the second half: its StepParams, RoPE rows, adapters and images."""
    n_rows, adapters = kind.n_rows, inputs.adapters
    step = replace(inputs.step, offset=inputs.step.offset + aligned(inputs.step.nbytes))
    rope = {name: table.rows(n_rows // 2, table.shape[0]) for name, table in inputs.rope.items()}
    if adapters:
        begin = first_half(kind).adapter_words
        adapters = View(adapters.buffer, adapters.offset + 4 * begin, (adapters.shape[0] - begin,), "u32")
    images = tuple(table.rows(1 + n_rows // 2, table.shape[0]) for table in inputs.images)
    return replace(inputs, step=step, rope=rope, adapters=adapters, images=images)


def ordered(graphs: Sequence[Graph], d: int) -> Recording:
    limits = graphs[0].devices[d].limits
    fused = [fuse(graph.recordings[d], limits) if env.fusing() else graph.recordings[d] for graph in graphs]
    first, *rest = [by_depth(recording) for recording in fused]
    return interleave(first, rest[0], "halves") if rest else first
