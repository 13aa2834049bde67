"""Compute how much memory steps need in addition to weights and caches. To do so, build the largest steps
without addresses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vkbackend.buffer import ALIGN, Buffer, Home, View, Virtual, aligned, nowhere
from vkbackend.collector import collection_paused
from vkbackend.memory import plan_scratch
from vkbackend.meta.reduce import Provider, Reduce, ReduceSlots
from vkbackend.meta.split import Ranges
from vkbackend.meta.step_builder import Build, StepBuilder, ordered
from vkbackend.meta.step_kind import StepKind, Wanted, bucket, mix_of
from vkbackend.meta.tensor import Inputs
from vkbackend.ops import MAX_VEC_ROWS
from vkbackend.recording import Copy, Dispatch, Recording
from vkbackend.repeats import section_of
from vkbackend.runtime import Device
from vkbackend.step import Mix, step_words
from vkbackend.wire import wire_words

# Names in StepShape.places for the rows' adapter ids and scales, the expert caches' tables, and the rows of
# images.
ADAPTERS, EXPERTS, IMAGES = "adapters", "experts", "images"
SUMS = ("add_partials",)  # ops whose push constants contain the index of the device's own share


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of the largest step. The host writes tables with a row per row of the step, such as RoPE's.
    `rope_widths` maps each table's name to its floats per row. `active` maps an outermost scope of the graph
    to the devices that compute it and read its sums (default: all devices)."""

    n_rows: int
    n_outputs: int
    vocab: Ranges
    rope_widths: Mapping[str, int] = field(default_factory=dict)
    active: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    top_k: int = 0  # Maximum number of candidates per output row, or 0 for all logits.
    halves: int = 0  # Minimum rows of a step in halves, or 0 if no step has halves.
    n_slots: int = 0  # Maximum number of runs of a step, or 0 for a run per row.
    adapters: int = 0  # Maximum number of adapters of a row.
    n_embd: int = 0  # Width of a hidden state, or 0 if no step outputs hidden states.
    # An encoder: rows attend to later rows. Steps never decode. They output only hidden states: `n_outputs`
    # of them, or one per row if `n_outputs` is 0.
    encodes: bool = False
    experts: tuple[int, int] = (0, 0)  # (words of all expert cache tables, number of experts of their layers)
    draft_vocab: Ranges = ()  # The vocabulary of drafts, at most as large as `vocab` (default: `vocab`).
    streamed: frozenset[int] = frozenset()  # Layers whose weights are copied from the file.
    n_streamed_experts: int = 0  # The maximum number of experts of a layer in `streamed`.
    n_image_tables: int = 0  # Number of tables of images' rows, each `n_embd` wide (0: no images).

    def places(self) -> tuple[dict[str, int], int]:
        """Return (offsets, total bytes) of the parameters. `offsets` maps the names of RoPE tables, ADAPTERS,
        EXPERTS and IMAGES to byte offsets, which follow the StepParams of both halves."""
        offsets, total = {}, 2 * aligned(4 * step_words(self.n_rows))
        for name, width in self.rope_widths.items():
            offsets[name], total = total, total + aligned(4 * self.n_rows * width)
        if self.adapters:
            offsets[ADAPTERS], total = total, total + aligned(4 * self.adapter_words)
        if self.experts[0]:
            offsets[EXPERTS], total = total, total + aligned(4 * self.experts[0])
        if self.n_image_tables:
            offsets[IMAGES], total = total, total + self.n_image_tables * self.image_table_nbytes
        return offsets, total

    @property
    def image_table_nbytes(self) -> int:
        """Return the number of bytes of a table of images' rows. Each half of a step begins with a row of
        zeros."""
        return aligned(4 * (2 + self.n_rows) * self.n_embd)

    @property
    def counts_nbytes(self) -> int:
        """Return the number of bytes of the experts' use counts and of the ids of a layer's used experts."""
        return aligned(4 * 2 * self.experts[1]) + aligned(4 * self.n_streamed_experts)

    @property
    def adapter_words(self) -> int:
        return StepKind(self.n_rows, self.n_outputs, Mix.DECODE, adapters=self.adapters).adapter_words

    @property
    def hidden_device(self) -> int:
        """Return the device that outputs hidden states: the first of the devices that compute the output."""
        return self.active.get("", (0,))[0]

    @property
    def n_hidden(self) -> int:
        """Return how many hidden states a step may output: as many as fit the memory for logits, and at least
        one."""
        if self.encodes or not self.n_embd:
            return self.n_outputs or self.n_rows if self.n_embd else 0
        fits = max(1, self._vocab_nbytes(self.hidden_device) // (4 * self.n_embd))
        return min(self.n_rows, 1 << fits.bit_length() - 1)

    def logits_nbytes(self, device: int) -> int:
        begin, end = self.vocab[device]
        return 4 * self.n_outputs * (end - begin)

    def mask_words(self, device: int) -> int:
        """Return the number of words of an output row's mask, with a bit per vocabulary row. It is 0 without
        candidates."""
        begin, end = self.vocab[device]
        return -(-(end - begin) // 32) if self.top_k else 0

    def _vocab_nbytes(self, device: int) -> int:
        return aligned(self.logits_nbytes(device)) + 4 * self.n_outputs * self.mask_words(device)

    def outputs_nbytes(self, device: int) -> int:
        """Return the number of bytes of a device's output region, for logits and masks, or for hidden
        states."""
        hidden = 4 * self.n_hidden * self.n_embd if device == self.hidden_device else 0
        return max(self._vocab_nbytes(device), hidden)

    def inputs(
        self, device: int, host: Buffer, local: Buffer, region: Buffer | None, counts: Buffer | None = None
    ) -> Inputs:
        offsets, total = self.places()
        rope = {
            name: View(local, offsets[name], (self.n_rows, width // 2, 2))
            for name, width in self.rope_widths.items()
        }
        begin, end = self.vocab[device]
        words, at = self.mask_words(device), aligned(self.logits_nbytes(device))
        n_ids = self.n_streamed_experts
        hidden = region if self.n_embd and device == self.hidden_device else None
        images = (offsets[IMAGES] + i * self.image_table_nbytes for i in range(self.n_image_tables))
        return Inputs(
            View(local, 0, (step_words(self.n_rows),), "u32"),
            rope,
            View(host, 0, (total // 4,)),
            View(local, 0, (total // 4,)),
            View(region, 0, (self.n_outputs, end - begin)) if region and begin < end else None,
            View(region, at, (self.n_outputs, words), "u32") if region and words else None,
            View(local, offsets[ADAPTERS], (self.adapter_words,), "u32") if self.adapters else None,
            View(hidden, 0, (self.n_hidden, self.n_embd)) if hidden else None,
            View(local, offsets[EXPERTS], (self.experts[0],), "u32") if self.experts[0] else None,
            View(counts, 0, (2, self.experts[1]), "u32") if counts and self.experts[1] else None,
            View(counts, aligned(8 * self.experts[1]), (n_ids,), "u32") if counts and n_ids else None,
            self.streamed,
            tuple(View(local, at, (2 + self.n_rows, self.n_embd)) for at in images),
        )

    def unplaced(self, device: int) -> Inputs:
        """Return `inputs` without memory."""
        buffer = nowhere()
        counts = nowhere(Home.STAGING, "counts") if self.counts_nbytes else None
        return self.inputs(device, buffer, buffer, buffer if self.outputs_nbytes(device) else None, counts)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes in bytes. Each device has an arena for values, and `logits` bytes for logits and masks. Device
    and host each need `params` bytes for parameters. `slot` is the size of a device's share in the largest
    reduce (0: no reduces). `largest` is each device's largest binding of a value or of a reduce's slots."""

    arenas: tuple[int, ...]
    params: int
    logits: tuple[int, ...]
    slot: int
    largest: tuple[int, ...] = ()
    counts: int = 0  # Bytes for the experts' use counts and ids.
    # A number for each outermost scope. Scopes with equal numbers record equal ops.
    forms: Mapping[str, int] = field(default_factory=dict, compare=False)

    def scratch(self, device: int) -> int:
        return self.arenas[device] + self.params

    def staging(self, device: int) -> int:
        return self.params + aligned(self.logits[device]) + self.counts


@collection_paused()
def measure(
    devices: Sequence[Device],
    build: Build,
    shape: StepShape,
    reduce_type: str = "auto",
    reuse: bool = True,
    short: Build | None = None,
) -> StepSizes:
    """Return the largest sizes over all kinds of steps up to `shape`. If `reuse` is set, values share memory.
    `short` builds the model without repeated layers. If both need equal memory for the first kind of step,
    `short` replaces `build` for the other kinds."""
    n, params = len(devices), shape.places()[1]
    sizing, inputs = Sizing(n), [shape.unplaced(d) for d in range(n)]

    largest = [0] * n
    forms: dict[str, int] = {}

    def sizes(kind: StepKind, build: Build) -> tuple[list[int], int]:
        """Return (bytes of each arena, words of the largest slot). Also update `largest`."""
        graphs = StepBuilder(devices, inputs, sizing, build, shape.active, reduce_type).graphs(kind)
        arenas, alike = [], dict[object, int]()  # memory is planned once for devices with equal recordings
        for d, device in enumerate(devices):
            key = (device.limits, *(form_of(graph.recordings[d]) for graph in graphs)) if n > 1 else None
            if key not in alike:
                alike[key] = plan_scratch(ordered(graphs, d), reuse)[1]
            arenas.append(max(ALIGN, alike[key]))
            largest[d] = max(largest[d], *(_largest_binding(graph.recordings[d]) for graph in graphs))
        if not forms:  # of the first kind, which has all layers
            forms.update(scope_forms(recording for graph in graphs for recording in graph.recordings))
        # A slot must have room for the packed shares and for the f32 sums.
        reduces = [reduce for graph in graphs for reduce in graph.reduces if reduce]
        return arenas, max((max(r.elements, wire_words(r.wire, r.elements)) for r in reduces), default=0)

    first, *rest = step_kinds(shape)
    needs = [sizes(first, build)]
    if short and sizes(first, short) == needs[0]:
        build = short
    needs += [sizes(kind, build) for kind in rest]
    arenas = tuple(max(of_device) for of_device in zip(*(arenas for arenas, _ in needs), strict=True))
    logits = tuple(shape.outputs_nbytes(d) for d in range(n))
    return StepSizes(
        arenas,
        params,
        logits,
        4 * max(words for _, words in needs),
        tuple(largest),
        shape.counts_nbytes,
        forms,
    )


def _largest_binding(recording: Recording) -> int:
    """Return the number of bytes of the largest range that a dispatch binds in scratch memory or in the host
    pages of all-reduces."""
    views = (view for c in recording.commands if isinstance(c, Dispatch) for view in c.bound)
    sized = (v.nbytes for v in views if isinstance(v.buffer, Virtual) or v.buffer.home is Home.PAGES)
    return max(sized, default=0)


def step_kinds(shape: StepShape) -> list[StepKind]:
    """Return the kinds of steps that may need the most memory, the largest first. Steps with fewer output
    rows need less, and so do steps with logits instead of candidates."""
    if shape.encodes:
        kind = StepKind(shape.n_rows, shape.n_hidden, Mix.PREFILL, Wanted(hidden=True))
        return [kind._replace(adapters=shape.adapters)]
    few, n_slots = min(shape.n_rows, MAX_VEC_ROWS), shape.n_slots or shape.n_rows
    mixes: list[tuple[int, Mix]] = []
    if shape.n_rows > few:
        # A slot has at most one run in a step, so with a single slot no step mixes decoding and prompts. A
        # mixed step has the values of a prefill, and more.
        mixes.append((shape.n_rows, Mix.BOTH if n_slots > 1 else Mix.PREFILL))
    if n_slots > few:
        mixes.append((min(shape.n_rows, bucket(n_slots)), Mix.DECODE))
    mixes.append((few, mix_of(few)))  # splits keys at least as often as a step of runs of one row
    kinds: list[StepKind] = []
    for rows, mix in mixes:
        most = min(rows, shape.n_outputs)
        kinds.append(StepKind(rows, most, mix, Wanted(shape.top_k)))
        if shape.top_k and (mix is Mix.BOTH or mix is mix_of(rows)):
            kinds.append(StepKind(rows, most, mix_of(rows), Wanted(shape.top_k, summed=True), masked=True))
    if shape.halves and shape.n_rows >= shape.halves:
        most = min(shape.n_rows // 2, shape.n_outputs)
        kinds.append(StepKind.of_run(shape.n_rows, most, shape.top_k, halves=True))
    # With adapters, a step may need more or less memory than without, because other values then share memory.
    kinds += [kind._replace(adapters=shape.adapters) for kind in kinds]
    if shape.n_image_tables:
        kinds += [kind._replace(images=True) for kind in kinds]
    return list(dict.fromkeys(kinds))


def form_of(recording: Recording) -> tuple[object, ...]:
    """Return the commands, with buffers numbered by first use, so that recordings can be compared. The push
    constants of SUMS are omitted, because they differ between devices."""
    numbers: dict[object, int] = {}

    def where(view: View) -> tuple[object, ...]:
        return numbers.setdefault(view.buffer, len(numbers)), view.offset, view.shape, view.dtype

    form: list[object] = []
    for c in recording.commands:
        if isinstance(c, Dispatch):
            push = () if c.op in SUMS else c.push
            form.append((c.op, c.variant, push, c.consts, c.groups, *map(where, c.args), c.step is None))
        elif isinstance(c, Copy):
            form.append((where(c.src), where(c.dst)))
        else:
            form.append(type(c))
    return tuple(form)


def scope_forms(recordings: Iterable[Recording]) -> dict[str, int]:
    """Give each layer a number. Layers whose ops, constants and grids are equal get the same number; views
    are ignored."""
    ops: dict[str, list[object]] = {}
    for n, recording in enumerate(recordings):
        for c in recording.commands:
            if isinstance(c, Dispatch):
                ops.setdefault(section_of(c.label), []).append(
                    (n, c.op, c.variant, c.push, c.consts, c.groups)
                )
    numbers: dict[object, int] = {}
    return {section: numbers.setdefault(tuple(form), len(numbers)) for section, form in ops.items()}


class Sizing(Provider):
    name = "sizing"

    def __init__(self, n: int) -> None:
        self._n, self._buffer = n, Buffer(1 << 40, Home.PAGES, "sizing")

    def slot(self, device: int, reduce: Reduce) -> View:
        return View(self._buffer, 0, (1 << 30,), "u32")

    def readable(self, device: int, reduce: Reduce) -> ReduceSlots:
        own_index = device if device in reduce.writers else None
        mask = sum(1 << w for w in reduce.writers)
        stride = max(reduce.elements, wire_words(reduce.wire, reduce.elements))
        return ReduceSlots(self._buffer, 0, stride, self._n, own_index, mask, reduce.wire)

    def host_bytes(self, device: int, reduce: Reduce) -> np.ndarray:
        raise AssertionError("a sizing graph never runs")

    def exchange(self, reduce: Reduce) -> None:
        raise AssertionError("a sizing graph never runs")

    def close(self) -> None:
        pass
