"""Traces steps of a layout on devices without memory, to find scratch sizes, all-reduces, and the recording
of a step of one token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from vkbackend.buffer import Home, View, aligned, nowhere
from vkbackend.limits import Limits
from vkbackend.meta.expert_slots import attach_slots
from vkbackend.meta.graph import Graph
from vkbackend.meta.ops.low_rank import B, attach
from vkbackend.meta.reduce import Reduce
from vkbackend.meta.sizing import Sizing, StepShape, StepSizes, measure
from vkbackend.meta.slices import Load, expert_pieces, piece_nbytes, piece_shapes
from vkbackend.meta.speed import resource_of
from vkbackend.meta.split import MIRRORED, State, split
from vkbackend.meta.step_builder import Build, StepBuilder
from vkbackend.meta.step_kind import MAX_ADAPTERS, StepKind, Wanted, bucket
from vkbackend.meta.tensor import Weight
from vkbackend.models.architectures.base import Model, Weights
from vkbackend.models.architectures.memory_specs import LayerCache, LayerMemory, LayerState
from vkbackend.models.options import DEFAULT_ROWS, Options
from vkbackend.models.placement.layout import (
    Layout,
    layer_of,
    memories,
)
from vkbackend.ops import MAX_TOP_K
from vkbackend.ops.target import MAX_GROUPS
from vkbackend.recording import Recording
from vkbackend.repeats import name_in_layer
from vkbackend.runtime import Device
from vkbackend.step import MAX_ROWS, Mix
from vkbackend.twins.device import NullDevice

# With a smaller vocabulary, reading all logits is faster than choosing the top k on a device.
TOP_K_VOCAB = 4096
# Micro-batches with at least this many rows are split in two. Smaller halves would not fill a device.
HALVES_FROM = 64
LOGITS_NBYTES = 16 << 20  # Limit for a step's logits.


def in_halves(devices: Sequence[Device], options: Options) -> bool:
    """Return whether large micro-batches are computed in two halves, where one half computes while the other
    half's sums are exchanged. Halves gain nothing on one physical device."""
    return options.split_mode == "tensor" and len({resource_of(device) for device in devices}) > 1


def most_rows(model: Model) -> int:
    """Return the maximum number of rows of a step. Ops for experts dispatch a workgroup per row and used
    expert."""
    return min(MAX_ROWS, 1 << (MAX_GROUPS // max(1, model.n_used)).bit_length() - 1)


def step_shape(
    model: Model, layout: Layout, options: Options, n_ubatch: int, halves: bool = False
) -> StepShape:
    rows = bucket(min(n_ubatch, options.n_ctx * options.n_slots, most_rows(model)))
    fits = max(LOGITS_NBYTES // (4 * model.n_vocab), 1)
    outputs = min(rows, max(bucket(options.n_slots), 1 << fits.bit_length() - 1))
    widths = {name: table.n_rot for name, table in model.ropes(options.n_ctx).items()}
    vocab = layout.output_plan.ranges["vocab"]
    adapters = min(bucket(model.n_adapters), MAX_ADAPTERS)
    if model.encodes:
        return StepShape(
            rows,
            0,
            tuple((0, 0) for _ in vocab),
            widths,
            layout.active,
            adapters=adapters,
            n_embd=model.n_embd,
            encodes=True,
            experts=layout.experts,
        )
    least = min(end - begin for begin, end in vocab if end > begin)
    top_k = MAX_TOP_K if model.n_vocab >= TOP_K_VOCAB and least >= 4 * MAX_TOP_K else 0
    least_rows = HALVES_FROM if halves else 0
    return StepShape(
        rows,
        outputs,
        vocab,
        widths,
        layout.active,
        top_k,
        least_rows,
        options.n_slots,
        adapters,
        model.n_embd,
        experts=layout.experts,
        draft_vocab=layout.output_plan.ranges.get("draft_vocab", vocab),
        streamed=layout.streamed,
        n_streamed_experts=layout.n_streamed_experts,
        n_image_tables=1 + model.n_deepstack if options.mmproj else 0,
    )


def step_sizes(
    model: Model,
    layout: Layout,
    options: Options,
    limits: Sequence[Limits],
    shape: StepShape,
    reuse: bool = True,
) -> StepSizes:
    """Return the memory that steps need, without weights and caches. If `reuse`, values share memory."""
    devices, build = _traced(model, layout, limits)
    of_layers = layers_of(layout, devices)[: model.n_layer - model.n_ahead]
    n = repeating(of_layers) if reuse else len(of_layers)
    short = _traced(model, layout, limits, n)[1] if n < len(of_layers) else None
    return measure(devices, build, shape, options.reduce_type, reuse, short)


def fitting_steps(
    model: Model,
    layout: Layout,
    options: Options,
    limits: Sequence[Limits],
    n_ubatch: int,
    *,
    halves: bool = False,
    reuse: bool = True,
) -> tuple[StepShape, StepSizes]:
    """Return shape and memory of steps with at most `n_ubatch` rows. If a value would exceed a storage
    binding, the rows are halved, down to DEFAULT_ROWS."""
    while True:
        shape = step_shape(model, layout, options, n_ubatch, halves)
        sizes = step_sizes(model, layout, options, limits, shape, reuse)
        too_large = any(n > of.max_storage_range for n, of in zip(sizes.largest, limits, strict=True))
        if not too_large or shape.n_rows <= DEFAULT_ROWS:
            return shape, sizes
        n_ubatch = max(DEFAULT_ROWS, shape.n_rows // 2)


def token_recordings(
    model: Model, layout: Layout, options: Options, limits: Sequence[Limits], shape: StepShape
) -> list[Recording]:
    """Record a step of one token on each device, without repeated layers."""
    kind = StepKind.of_run(1, 1, shape.top_k)
    if shape.encodes:
        kind = kind._replace(mix=Mix.PREFILL, wanted=Wanted(hidden=True))
    return recordings_of(kind, model, layout, options, limits, shape)


def recordings_of(
    kind: StepKind,
    model: Model,
    layout: Layout,
    options: Options,
    limits: Sequence[Limits],
    shape: StepShape,
) -> list[Recording]:
    """Record a step on each device, without repeated layers."""
    devices, _ = _traced(model, layout, limits)
    of_layers = layers_of(layout, devices)[: model.n_layer - model.n_ahead]
    build = _traced(model, layout, limits, repeating(of_layers))[1]
    inputs = [shape.unplaced(d) for d in range(len(devices))]
    sizing = Sizing(len(devices))
    builder = StepBuilder(devices, inputs, sizing, build, layout.active, options.reduce_type)
    return builder.recorded(kind).recordings


# Each pair of neighbouring layers is traced three times. The third repeat reuses an earlier layer's memory.
REPEATS = 3


def repeating(layers: Sequence[object]) -> int:
    """Return how many of the first layers represent the model. These layers contain every pair of
    neighbouring layers up to REPEATS times, and end with the same kind of layer as the model."""
    pairs = list(pairwise(layers))
    missing = Counter({pair: min(count, REPEATS) for pair, count in Counter(pairs).items()})
    for n, pair in enumerate(pairs, 2):
        missing[pair] -= 1
        if layers[n - 1] == layers[-1] and not +missing:
            return n
    return len(layers)


def layers_of(layout: Layout, devices: Sequence[Device]) -> list[object]:
    """Describe each layer by its caches and its weights' shapes. Repeated layers have equal descriptions."""
    parts: list[list[object]] = [[] for _ in layout.plans]
    for load in layout.loads:
        if (il := layer_of(load.name)) is not None:
            shapes = tuple(
                tuple(shape for _, shape in piece_shapes(load, d, piece_nbytes(device)))
                for d, device in enumerate(devices)
            )
            parts[il].append((name_in_layer(load.name), load.dtype, shapes, load.home is Home.STREAM))
    for prefix, table in layout.tables.items():
        parts[int(prefix.split(".")[1])].append((table.n_experts, table.n_slots))
    for plan in layout.memories():
        parts[plan.layer].append((type(plan), repr(plan.spec), [plan.nbytes(d) for d in range(len(devices))]))
    owners = [None if owner is None else repr(parts[owner]) for owner in layout.cache_owners]
    return [(repr(part), owner) for part, owner in zip(parts, owners, strict=True)]


def trace_reduces(
    model: Model,
    layout: Layout,
    options: Options,
    limits: Sequence[Limits],
    n_rows: int = 1,
    ahead: bool = False,
) -> list[Reduce]:
    """Return a step's all-reduces. If `ahead` is set, it is a step of the multi-token prediction head."""
    devices, build = _traced(model, layout, limits)
    shape = replace(step_shape(model, layout, options, n_rows), n_rows=n_rows, n_outputs=1)
    inputs = [shape.unplaced(d) for d in range(layout.n_devices)]
    kind, sizing = StepKind.of_run(n_rows, 1), Sizing(len(devices))
    if shape.encodes:
        kind = kind._replace(mix=Mix.PREFILL, wanted=Wanted(hidden=True))
    elif ahead:
        kind = kind._replace(wanted=Wanted(ahead=True))
    graph = Graph(devices, inputs, sizing, kind, layout.active, options.reduce_type)
    build(graph)
    return graph.reduces


def unadapted(
    model: Model, layout: Layout, options: Options, limits: Sequence[Limits], shape: StepShape
) -> list[str]:
    """Return the adapted weights whose adapters are not applied by any product, in steps of the model and of
    the head."""
    devices, build = _traced(model, layout, limits)
    inputs = [shape.unplaced(d) for d in range(layout.n_devices)]
    # Unequal numbers distinguish rows from output rows.
    kinds = [StepKind.of_run(2, 1)._replace(adapters=1)]
    if shape.encodes:
        kinds = [kinds[0]._replace(mix=Mix.PREFILL, wanted=Wanted(hidden=True))]
    elif model.n_ahead:
        kinds.append(kinds[0]._replace(wanted=Wanted(ahead=True)))
    names = {spec.name.removesuffix(B) for spec in model.low_rank if spec.name.endswith(B)}
    for kind in kinds:
        graph = Graph(devices, inputs, Sizing(len(devices)), kind, layout.active, options.reduce_type)
        build(graph)
        names -= graph.adapted
    return sorted(names)


def _traced(
    model: Model, layout: Layout, limits: Sequence[Limits], n_layer: int | None = None
) -> tuple[list[NullDevice], Build]:
    """Trace the first `n_layer` layers (default: all) and the heads."""
    devices = [NullDevice(f"traced.{d}", limit) for d, limit in enumerate(limits)]
    places = [_Places() for _ in devices]
    by_name = traced_weights(layout.loads, devices, places)
    attach(by_name, model.n_adapters)
    ranges = [piece_nbytes(device) for device in devices]
    attach_slots(
        by_name,
        layout.stacks,
        layout.tables,
        ranges,
        lambda d, shapes: [places[d].view(*of_piece) for of_piece in shapes],
    )
    weights, caches, n_target = Weights(by_name), _caches(layout), model.n_layer - model.n_ahead
    caches = [*caches[:n_target][:n_layer], *caches[n_target:]]
    return devices, lambda graph: model.forward(graph, weights, caches)


def traced_weights(
    loads: Sequence[Load], devices: Sequence[NullDevice], places: Sequence[_Places] = ()
) -> dict[str, Weight]:
    """Return weights with addresses and without memory."""
    places = places or [_Places() for _ in devices]
    return {load.name: _weight(load, devices, places) for load in loads}


class _Places:
    """Assigns addresses to weights in loading order, without memory, so that fusion sees which matrices are
    adjacent."""

    def __init__(self) -> None:
        self._buffer, self._end = nowhere(Home.WEIGHTS, "traced"), 0

    def view(self, shape: tuple[int, ...], dtype: str) -> View:
        view = View(self._buffer, self._end, shape, dtype)
        self._end = aligned(view.end)
        return view


def _view(shape: tuple[int, ...], dtype: str = "f32") -> View:
    return View(nowhere(Home.WEIGHTS, "traced"), 0, shape, dtype)


def _weight(load: Load, devices: Sequence[NullDevice], places: Sequence[_Places]) -> Weight:
    streamed = load.home is Home.STREAM
    weight = Weight(load.name, load.shape, load.dtype, load.state, [], streamed=streamed)
    for d, (device, place) in enumerate(zip(devices, places, strict=True)):
        most = piece_nbytes(device)
        weight.pieces.append(
            [(first, place.view(shape, load.dtype)) for first, shape in piece_shapes(load, d, most)]
        )
        if len(load.shape) == 3 and expert_pieces(load, d, most):
            weight.starts[d] = place.view((load.shape[0] + 1,), "u32")
    return weight


def _caches(layout: Layout) -> list[LayerMemory]:
    caches: dict[int, LayerCache] = {}
    states: dict[int, LayerState] = {}
    for state in layout.states:
        arrays = (_cache(state.n_cells, how, "f32", layout.n_devices) for _, _, how in state.arrays())
        states[state.layer] = LayerState(dict(zip(state.names(), arrays, strict=True)))
    for plan in layout.caches:
        shape = plan.n_slots, plan.width
        cells = Weight("cells", shape, "u32", MIRRORED, [[(0, _view(shape, "u32"))]] * layout.n_devices)
        held = {
            name: _cache(plan.rows_of(name), split(1, plan.heads_of(name), [width]), dtype, layout.n_devices)
            for name, width, dtype in plan.arrays
        }
        kept = None
        if plan.spec.n_kept:
            kept = Weight("kept", plan.kept, "f32", MIRRORED, [[(0, _view(plan.kept))]] * layout.n_devices)
        caches[plan.layer] = LayerCache(
            held["k"],
            held.get("v", held["k"]),
            cells,
            plan.spec.window,
            index=held.get("index"),
            raw=held.get("raw"),
            kept=kept,
            entry_table=cells if plan.entry_ring != plan.ring else None,
            first_entry=plan.n_cells,
        )
    return memories(layout, caches, states)


def _cache(n_cells: int, state: State, dtype: str, n_devices: int) -> Weight:
    counts = [state.count(d) for d in range(n_devices)]
    pieces = [[(0, _view((n_cells, n), dtype))] if n else [] for n in counts]
    width = max(end for _, end in state.ranges) * (sum(state.segments) or 1)
    return Weight("cache", (n_cells, width), dtype, state, pieces)
