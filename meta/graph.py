"""The graph of a step. It has a recording per device, which is divided into segments where devices exchange
sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from vkbackend.buffer import View, Virtual
from vkbackend.errors import PlanError
from vkbackend.meta import sums
from vkbackend.meta.known_speed import pace_of
from vkbackend.meta.reduce import PART, Provider, Reduce, ReduceSlots, parts_of, wire_of
from vkbackend.meta.split import MIRRORED, Kind, State, partial
from vkbackend.meta.step_kind import StepKind
from vkbackend.meta.streams import Fetch, uses_all
from vkbackend.meta.tensor import Inputs, Tensor, Weight
from vkbackend.ops import MAX_VEC_ROWS, Groups, Recorder
from vkbackend.recording import Pace, Recording
from vkbackend.repeats import name_in_layer
from vkbackend.runtime import Device
from vkbackend.step import step_words
from vkbackend.wire import wire_block, wire_words

T = TypeVar("T")


class _Arrival(NamedTuple):
    """Rows begin..end of a sum whose shares the devices can read."""

    begin: int
    end: int
    slots: Mapping[int, ReduceSlots]
    shares: Sequence[View | None]


def row_pieces(n_rows: int, width: int, wire: str, n: int) -> list[tuple[int, int]]:
    """Divide rows into at most n equal pieces that begin at blocks of the wire format."""
    block = wire_block(wire)
    grain = block // math.gcd(block, width)
    size = -(-n_rows // n // grain) * grain if n > 1 else n_rows
    return [(at, min(n_rows, at + size)) for at in range(0, n_rows, max(size, grain))]


@dataclass(slots=True)
class Graph:
    """The graph of a step or of half of its rows. `kind` holds the row counts of this graph, not of the
    complete step."""

    devices: Sequence[Device]
    inputs: Sequence[Inputs]
    provider: Provider | None
    kind: StepKind
    active: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # as in StepShape
    wire: str = "f32"
    lane: int = 0  # Reduces use this half (0 or 1) of the slots.
    skipped: Collection[int] = ()  # Layers that are not recorded, because they repeat earlier layers.
    check: Callable[[], None] = lambda: None  # called before every layer; may raise
    recordings: list[Recording] = field(init=False)
    # the exchange or fetch at the end of each segment but the last
    meetings: list[Reduce | Fetch] = field(default_factory=list)
    kept: dict[str, Tensor] = field(default_factory=dict)  # by name, for later layers
    values: dict[str, list[View | None]] = field(default_factory=dict)  # by label
    adapted: set[str] = field(default_factory=set)  # weights whose adapters were applied
    adapter_groups: dict[int, Groups | None] = field(default_factory=dict)  # by device
    _paces: dict[int, Pace] = field(default_factory=dict)
    _scope: str = ""
    _section: str = ""

    def __post_init__(self) -> None:
        name = f"step rows={self.n_rows} outputs={self.n_outputs}"
        self.recordings = [Recording(f"{name} {device.name}") for device in self.devices]

    @property
    def n_rows(self) -> int:
        return self.kind.n_rows

    @property
    def n_outputs(self) -> int:
        return self.kind.n_outputs

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        outer, self._scope = self._scope, f"{self._scope}{name}."
        section, self._section = self._section, self._section or name
        try:
            yield
        finally:
            self._scope, self._section = outer, section

    def recorded_layers(self, layers: Sequence[T]) -> Iterator[tuple[int, T]]:
        """Yield (number, layer) of the layers that are recorded. A segment ends before a layer whose weights
        are copied from the file."""
        for il, layer in enumerate(layers):
            if il not in self.skipped:
                self.check()
                if il in self.inputs[0].streamed:
                    self._meet(Fetch(), f"blk.{il}.fetch")
                yield il, layer

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return sums.add(a, b)

    def label(self, name: str) -> str:
        return self._scope + name

    def on(self, d: int, name: str | Weight) -> Recorder:
        """Return a recorder for device d. The ops' label is the weight's name, or `name` within this
        scope."""
        label = name.name if isinstance(name, Weight) else self.label(name)
        return Recorder(self.recordings[d], self.devices[d].limits, label)

    @property
    def n(self) -> int:
        return len(self.devices)

    def pace(self, d: int) -> Pace:
        """Return the speed for which long products of device d are divided."""
        if d not in self._paces:
            self._paces[d] = pace_of(self.devices[d])
        return self._paces[d]

    def readers(self) -> tuple[int, ...]:
        """Return the devices that need complete values in this scope."""
        return self.active.get(self._section, tuple(range(self.n)))

    def new(
        self, rows: int, width: int, state: State, label: str, holders: Sequence[int] | None = None
    ) -> Tensor:
        """Allocate a tensor in scratch memory, complete on each of `holders` (default: all devices) or split
        by columns."""
        label = self.label(label)
        tensor = Tensor(self, rows, width, state, [])
        widths = [state.count(d) if state.kind is Kind.SPLIT else width for d in range(self.n)]
        if state.kind is Kind.PARTIAL:
            holders = state.writers
        for d, local in enumerate(widths):
            holds = local > 0 and (holders is None or d in holders)
            tensor.views.append(View(Virtual(4 * rows * local, label), 0, (rows, local)) if holds else None)
        while label in self.values:
            label += "'"
        self.values[label] = list(tensor.views)
        return tensor

    def scratch(self, shape: tuple[int, ...], label: str) -> View:
        return View(Virtual(4 * math.prod(shape), self.label(label)), 0, shape)

    def begin(self) -> None:
        for recording, inputs in zip(self.recordings, self.inputs, strict=True):
            used = {"step": (inputs.step, step_words(self.n_rows))}
            for name, rope in inputs.rope.items():
                used[f"rope {name}"] = rope, self.n_rows * (rope.nbytes // 4 // rope.shape[0])
            if self.kind.adapters and inputs.adapters:
                used["adapters"] = inputs.adapters, self.kind.adapter_words
            if self.kind.images:
                words = (1 + self.n_rows) * inputs.images[0].shape[1]
                used |= {f"images {i}": (view, words) for i, view in enumerate(inputs.images)}
            if self.lane == 0 and inputs.experts:
                used["experts"] = inputs.experts, inputs.experts.shape[0]
            for name, (view, words) in used.items():
                at = inputs.host.offset + view.offset - inputs.device.offset
                recording.copy(
                    View(inputs.host.buffer, at, (words,)), View(view.buffer, view.offset, (words,)), name
                )

    def all_reduce(
        self, x: Tensor, norm: Weight | None = None, eps: float = 0.0, wire: str = ""
    ) -> tuple[Tensor, Tensor | None]:
        """Sum a PARTIAL tensor on all devices that read it. If `norm` is set, the same kernel computes the
        sum's RMS norm.

        No exchange is needed if one device is the only writer and the only reader. If a device that reads the
        sum lacks the addend `base`, a writing device adds `base` to its share.
        """
        if x.state.kind is not Kind.PARTIAL:
            raise PlanError(f"all_reduce of a tensor that is {x.state}")
        readers = self.readers()
        arrivals: Iterable[_Arrival]
        if x.state.writers != readers or len(readers) > 1:
            if x.base and any(x.base.views[d] is None for d in readers):
                x = self._fold_base(x)
            arrivals = self._exchange(x, readers, wire)
        else:
            [d] = readers
            share = x.on(d)
            only = {d: ReduceSlots.of_sum(share.buffer, share.offset, x.rows * x.width)}
            arrivals = [_Arrival(0, x.rows, only, x.views)]
        h = self.new(x.rows, x.width, MIRRORED, "h", readers)
        y = self.new(x.rows, x.width, MIRRORED, "h_norm", readers) if norm else None
        for begin, end, slots, shares in arrivals:

            def part(tensor: Tensor, d: int, begin: int = begin, end: int = end) -> View:
                return tensor.on(d) if end - begin == x.rows else tensor.on(d).rows(begin, end)

            for d in readers:
                own_share = shares[d] if slots[d].own_index is not None else None
                base, w = part(x.base, d) if x.base else None, norm.whole(d) if norm else None
                self._add_partials(
                    d, slots[d], base, own_share, w, part(h, d), part(y, d) if y else None, eps
                )
        return h, y

    def _add_partials(
        self,
        d: int,
        slots: ReduceSlots,
        base: View | None,
        own_share: View | None,
        norm: View | None,
        h: View,
        y: View | None,
        eps: float = 0.0,
        first: int = 0,
    ) -> None:
        self.on(d, "add_partials").add_partials(
            base,
            own_share,
            slots.view(math.prod(h.shape), first),
            norm,
            h,
            y,
            own_index=slots.own_index,
            writers=slots.writers,
            eps=eps,
            wire=slots.wire,
            slot_stride=slots.stride,
        )

    def _fold_base(self, x: Tensor) -> Tensor:
        """Return an equal tensor without `base`: one writer adds the base to its share."""
        assert x.base is not None
        d = next(d for d in x.state.writers if x.base.views[d] is not None)
        folded = Tensor(self, x.rows, x.width, x.state, list(x.views))
        folded.views[d] = self.new(x.rows, x.width, partial((d,)), "fold").on(d)
        self.on(d, "fold").add(x.on(d), x.base.on(d), folded.on(d))
        return folded

    def _exchange(self, x: Tensor, readers: Sequence[int], wire: str) -> Iterator[_Arrival]:
        """Record the exchange. After each piece, yield the slots that each reading device sums, and each
        device's own share as add_partials reads it. The segment that reads a piece also writes the shares of
        the next piece."""
        provider = self.provider
        assert provider is not None
        elements = x.rows * x.width
        wire = wire or self.wire
        invariant = any(d.limits.batch_invariant for d in self.devices)
        if wire == "auto" and invariant and self.n_rows <= MAX_VEC_ROWS:
            wire = "f32"  # the format would depend on the number of rows
        wire = wire_of(wire, elements, self.n, all(d.limits.is_cpu for d in self.devices))
        whole = Reduce(0, elements, x.state.writers, wire, lane=self.lane, readers=tuple(readers))
        pieces = row_pieces(x.rows, x.width, wire, provider.pieces(whole))
        reduce, shares = self._send(x, whole, pieces[0])
        for i, (begin, end) in enumerate(pieces):
            self._meet(reduce, self.label("all_reduce"))
            sent, shares_sent = reduce, shares
            if i + 1 < len(pieces):
                reduce, shares = self._send(x, whole, pieces[i + 1])
            if provider.scatters(sent):
                self._sum_parts(shares_sent, sent, provider)
                sent = replace(sent, gather=True)
                self._meet(sent, self.label("all_reduce"))
            for hop in range(1, provider.hops(sent)):
                self._pass_on(sent, hop, provider)
                later = replace(sent, parity=(sent.parity + hop) % 2, gather=True)
                self._meet(later, self.label("all_reduce"))
            if n_hops := provider.hops(sent):
                self._pass_on(sent, n_hops, provider)
            yield _Arrival(begin, end, {d: provider.readable(d, sent) for d in readers}, shares_sent)

    def _send(self, x: Tensor, whole: Reduce, rows: tuple[int, int]) -> tuple[Reduce, Sequence[View | None]]:
        """Record writing rows begin..end of all shares to the slots. Returns the reduce of these rows, and
        each device's own share as add_partials reads it."""
        provider, wire, (begin, end) = self.provider, whole.wire, rows
        assert provider is not None
        elements = (end - begin) * x.width
        reduce = replace(whole, parity=len(self.reduces) % 2)
        shares = list(x.views)
        if elements < whole.elements:
            reduce = replace(reduce, elements=elements, of=whole.elements)
            shares = [view and view.rows(begin, end) for view in shares]
        for d in reduce.writers:
            share, slot = shares[d], provider.slot(d, reduce)
            assert share is not None
            if wire == "f32":
                self.on(d, "partial to slot").copy(share, View(slot.buffer, slot.offset, share.shape))
                continue
            packed = View(slot.buffer, slot.offset, (wire_words(wire, elements),), "u32")
            if wire == "bf16":
                self.on(d, "pack").pack_bf16(share, packed)
                continue
            kept = None
            if provider.readable(d, reduce).own_index is not None:
                kept = replace(self.scratch(packed.shape, "kept"), dtype="u32")
            self.on(d, "pack").pack_halves(share, packed, kept)
            shares[d] = kept
        self._pass_on(reduce, 0, provider)
        return reduce, shares

    def _pass_on(self, reduce: Reduce, hop: int, provider: Provider) -> None:
        for d in range(self.n):
            for source, target in provider.passed(d, reduce, hop):
                self.on(d, f"hop {hop}").copy(source, target)

    def _meet(self, meeting: Reduce | Fetch, label: str) -> None:
        self.meetings.append(meeting)
        for recording in self.recordings:
            recording.exchange(label)

    @property
    def reduces(self) -> list[Reduce]:
        return [meeting for meeting in self.meetings if isinstance(meeting, Reduce)]

    def fetch_experts(self, ids: Mapping[int, View], n_experts: int, stacks: Sequence[Weight]) -> None:
        """End the segment, so that hosts can copy the used experts of streamed `stacks`. `ids` maps devices
        to u32 [n_rows, n_used]. The first of these devices on each node writes its ids to host memory. In a
        step that uses nearly all experts, do nothing, because the experts are copied ahead."""
        n_rows, n_used = next(iter(ids.values())).shape
        names = tuple(name_in_layer(w.name) for w in stacks if w.streamed)
        if names and not uses_all(n_rows, n_used, n_experts):
            n_ids, firsts = n_rows * n_used, {self.devices[d].node: d for d in reversed(list(ids))}
            for d in firsts.values():
                used = self.inputs[d].used
                assert used is not None
                self.on(d, "moe used").copy(
                    replace(ids[d], shape=(n_ids,)), View(used.buffer, used.offset, (n_ids,), "u32")
                )
            self._meet(Fetch(names, n_ids, tuple(firsts.values())), self.label("moe fetch"))

    def _sum_parts(self, shares: Sequence[View | None], reduce: Reduce, provider: Provider) -> None:
        for d, (begin, end) in enumerate(parts_of(reduce, self.n)):
            if begin == end:
                continue
            slots, gathered = provider.readable(d, reduce), provider.gathered(d, reduce)
            line = math.gcd(end - begin, PART)
            shape = ((end - begin) // line, line) if line >= 32 else (1, end - begin)
            h = View(gathered.buffer, gathered.offset + 4 * begin, shape)
            share = shares[d]
            if share and reduce.wire == "f16":
                at, n_words = wire_words("f16", begin), wire_words("f16", end - begin)
                share = View(share.buffer, share.offset + 4 * at, (n_words,), "u32")
            elif share:
                share = View(share.buffer, share.offset + 4 * begin, shape)
            self._add_partials(d, slots, None, share, None, h, None, first=begin)
