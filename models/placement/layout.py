"""Decides where every part of a model is placed, before anything is opened or allocated.

Split (slices by device) and placement (device memory or pinned host memory) are independent. A tensor on the
host is also split, and every device reads its slice from the host.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate
from math import prod

from vkbackend.buffer import Home
from vkbackend.collector import collection_paused
from vkbackend.errors import InvalidArgument
from vkbackend.formats import row_nbytes
from vkbackend.meta.expert_slots import cacheable, slot_nbytes, tables_of
from vkbackend.meta.plan import Dim, Plan, normalise, share_out, table
from vkbackend.meta.policy import Layer, plan_model
from vkbackend.meta.slices import Load, expert_slices, slices_of
from vkbackend.meta.split import MIRRORED, Ranges, State, holders, split, split_experts
from vkbackend.meta.tensor import SlotTable
from vkbackend.models.architectures.base import Model, all_weights
from vkbackend.models.architectures.memory_specs import LayerCache, LayerMemory, LayerState, MemorySpec, kv_of
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.options import Options
from vkbackend.models.placement.cache_plan import (
    CachePlan,
    blocks_of_owners,
    heads_of_owners,
    plan_caches,
    resized,
)
from vkbackend.models.placement.recurrent_state import StatePlan, plan_states, with_cells


@dataclass(frozen=True, slots=True)
class Layout:
    n_devices: int
    plans: list[Plan]
    output_plan: Plan
    loads: list[Load]
    caches: list[CachePlan]
    cache_owners: list[int | None]  # None if the layer has its own cache
    states: list[StatePlan]
    active: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # Each layer's computing devices.
    adapters: frozenset[str] = frozenset()  # names of low-rank adapters' loads
    # By layer, the stacks of experts in host memory, and the tables of layers with expert slots.
    stacks: Mapping[str, Sequence[Load]] = field(default_factory=dict)
    tables: Mapping[str, SlotTable] = field(default_factory=dict)
    streamed: frozenset[int] = frozenset()  # layers with weights that stay in the file

    @property
    def experts(self) -> tuple[int, int]:
        """Return the number of words of all tables, and the number of experts of their layers."""
        every = self.tables.values()
        return sum(table.n_words for table in every), sum(table.n_counts for table in every)

    @property
    def n_streamed_experts(self) -> int:
        return max((load.shape[0] for load in self.loads if is_streamed_stack(load)), default=0)

    def memories(self) -> list[CachePlan | StatePlan]:
        return [*self.caches, *self.states]

    def holds(self, device: int) -> bool:
        return any(load.state.ranges and weight_nbytes(load, device) for load in self.loads)

    def table(self) -> str:
        names = [f"blk.{il}" for il in range(len(self.plans))]
        return table([*self.plans, self.output_plan], [*names, "output"], self.n_devices)


@collection_paused()
def lay_out(model: Model, types: Mapping[str, str], n_devices: int, options: Options) -> Layout:
    """Raises InvalidArgument, PlanError, UnsupportedModel."""
    normalise(options.shares, n_devices)
    kv = memory_specs(model, options)
    layers = split_layers(model, types, kv)
    plans, output_plan = _plans(layers, model.n_vocab, n_devices, options)
    specs = all_weights(model)
    added = frozenset(spec.name for spec in model.low_rank)
    homes, plans, output_plan = _override(specs, options, plans, output_plan, layers, n_devices)
    plans = heads_of_owners(plans, kv)
    if model.draft_ids is not None:
        output_plan = _with_draft_vocabulary(output_plan, len(model.draft_ids))
    on_devices = options.n_gpu_layers  # "auto" means all layers here
    first_on_device = max(0, model.n_layer + 1 - on_devices) if isinstance(on_devices, int) else 0
    loads = []
    for spec in specs:
        il = layer_of(spec.name)
        plan = output_plan if il is None or spec.role.dim in ("vocab", "draft_vocab") else plans[il]
        on_host = spec.host or (model.n_layer if il is None else il) < first_on_device
        home = homes.get(spec.name, Home.HOST if on_host else Home.WEIGHTS)
        state = plan.state(spec.role, spec.shape, spec.name)
        if spec.name in added and il is not None and state == MIRRORED:
            state = _where_active(plan, spec.shape, n_devices)
        in_file = options.use_mmap and spec.name in model.in_file
        loads.append(Load(spec.name, spec.shape, types[spec.name], state, home, in_file))
    streamed = _streamed(model, loads, added, n_devices, options)
    loads = [
        replace(load, home=Home.STREAM, in_file=False)
        if layer_of(load.name) in streamed and _may_stream(load, added)
        else load
        for load in loads
    ]
    kv_homes = [
        Home.KV if options.kv_offload and il >= first_on_device else Home.HOST for il in range(model.n_layer)
    ]
    active = {f"blk.{il}": _active(plan) for il, plan in enumerate(plans)} | {"": _active(output_plan)}
    caches = plan_caches(kv, plans, kv_homes, options)
    owners = [layer_kv.owner if (layer_kv := kv_of(spec)) else None for spec in kv]
    states = plan_states(kv, plans, kv_homes, _file_nbytes(loads), options)
    stacks = cacheable([load for load in loads if is_host_stack(load)], n_devices)
    n_slots = slots_in(stacks, n_devices, options.moe_cache_nbytes)
    tables = tables_of(stacks, n_devices, n_slots) if n_slots else {}
    return Layout(
        *(n_devices, plans, output_plan, loads, caches, owners, states, active),
        *(added, stacks, tables, streamed),
    )


def layouts(model: Model, types: Mapping[str, str], n_devices: int) -> Callable[[Options], Layout]:
    """Return a function that lays out the model. It keeps its results, because loading asks several times."""
    return cache(partial(lay_out, model, types, n_devices))


def _may_stream(load: Load, added: Collection[str]) -> bool:
    """Return whether a weight may stay in the file. Small weights that all devices share, and the adapters
    `added`, are always pinned."""
    return load.home is Home.HOST and not load.shared and load.name not in added


def host_nbytes(layout: Layout) -> dict[int, int]:
    """For each layer, return the bytes of weights in host memory that may stay in the file, summed over all
    devices."""
    return _host_nbytes(layout.loads, layout.adapters, layout.n_devices)


def _host_nbytes(loads: Sequence[Load], added: Collection[str], n_devices: int) -> dict[int, int]:
    nbytes: dict[int, int] = {}
    for load in loads:
        if (il := layer_of(load.name)) is not None and (_may_stream(load, added) or load.home is Home.STREAM):
            of_load = sum(weight_nbytes(load, d) for d in range(n_devices))
            nbytes[il] = nbytes.get(il, 0) + of_load
    return nbytes


def _streamed(
    model: Model, loads: Sequence[Load], added: Collection[str], n_devices: int, options: Options
) -> frozenset[int]:
    """Return the layers whose weights stay in the file: all except the first layers, which fit in
    `pinned_mib`. An encoder's layers, which may run alone, and heads that predict tokens are pinned."""
    if options.pinned_mib == "auto" or model.encodes:
        return frozenset()
    nbytes = _host_nbytes(loads, added, n_devices)
    layers = sorted(il for il, n in nbytes.items() if n and il < model.n_layer - model.n_ahead)
    ends = accumulate(nbytes[il] for il in layers)
    return frozenset(il for il, end in zip(layers, ends, strict=True) if end > options.pinned_mib * 2**20)


def is_streamed_stack(load: Load) -> bool:
    return load.home is Home.STREAM and len(load.shape) == 3


def memory_specs(model: Model, options: Options) -> list[MemorySpec]:
    kv = [model.kv(il) for il in range(model.n_layer)]
    if not (model.encodes and shares_cache(options)):
        return kv
    n_own = 2 if model.n_staged else 1
    return [
        spec and replace(spec, owner=None if il < n_own else il % n_own)
        for il, spec in enumerate(map(kv_of, kv))
    ]


def split_layers(model: Model, types: Mapping[str, str], kv: Sequence[MemorySpec]) -> list[Layer]:
    """Return the properties of each layer that the split depends on."""
    return blocks_of_owners([model.layer(il, types) for il in range(model.n_layer)], kv)


def with_caches_of(layout: Layout, options: Options) -> Layout:
    """Return the layout with caches of the context, cells, slots and types of `options`. Raises
    InvalidArgument."""
    states = with_cells(layout.states, _file_nbytes(layout.loads), options)
    return replace(layout, caches=resized(layout.caches, options), states=states)


def _with_draft_vocabulary(plan: Plan, n: int) -> Plan:
    """Split a draft vocabulary in the same proportions as the model's vocabulary, so no device has more rows
    of it."""
    vocab = plan.ranges["vocab"]
    n_vocab = max(end for _, end in vocab)
    ranges = tuple((begin * n // n_vocab, end * n // n_vocab) for begin, end in vocab)
    return replace(plan, ranges={**plan.ranges, "draft_vocab": ranges})


def is_host_stack(load: Load) -> bool:
    """Return whether a tensor contains a layer's expert matrices, in host memory or in the file."""
    return load.home is not Home.WEIGHTS and bool(load.state.experts) and load.name.endswith("_exps.weight")


def slots_in(stacks: Mapping[str, Sequence[Load]], n_devices: int, nbytes: int) -> int:
    """Return how many slots per layer fit in `nbytes`, summed over all devices."""
    return nbytes // of_each if (of_each := slot_nbytes_of(stacks, n_devices)) else 0


def slot_nbytes_of(stacks: Mapping[str, Sequence[Load]], n_devices: int) -> int:
    """Return the number of bytes of one slot per layer, summed over all devices."""
    return sum(slot_nbytes(load, d) for loads in stacks.values() for load in loads for d in range(n_devices))


def shares_cache(options: Options) -> bool:
    """Return whether all layers of an encoder write to one cache. Each layer stores K and V before it
    attends, and nothing reads them later. The layers must be on the same devices."""
    together = options.split_mode in ("tensor", "none") and options.n_gpu_layers is None
    return together and not options.override_tensor


def memories(
    layout: Layout, caches: Mapping[int, LayerCache], states: Mapping[int, LayerState]
) -> list[LayerMemory]:
    by_layer: list[LayerMemory] = []
    for il, owner in enumerate(layout.cache_owners):
        if il in states:
            by_layer.append(replace(states[il], cache=caches.get(il)))
        elif owner is not None:
            by_layer.append(replace(caches[owner], shared=True))
        else:
            by_layer.append(caches.get(il) or LayerState({}))
    return by_layer


def layer_of(name: str) -> int | None:
    return int(name.split(".")[1]) if name.startswith("blk.") else None


def _where_active(plan: Plan, shape: tuple[int, ...], n: int) -> State:
    """Return the split state of an adapter's A or B, which is not split here. If only one device has the
    layer, only this device holds the matrix."""
    active = _active(plan)
    if len(active) != 1:
        return MIRRORED
    ranges = _whole(shape[-2], active[0], n)
    return split(0, ranges) if len(shape) == 2 else split_experts(1, [ranges] * shape[0])


def _active(plan: Plan) -> tuple[int, ...]:
    tiles = [*plan.ranges.values(), *plan.experts]
    return tuple(sorted({d for ranges in tiles for d in holders(ranges)}))


def _plans(layers: Sequence[Layer], n_vocab: int, n: int, options: Options) -> tuple[list[Plan], Plan]:
    if options.split_mode == "tensor":
        return plan_model(layers, n_vocab, n, options.shares, options.split_policy)
    if options.split_mode == "hosts":
        return _plans_of_hosts(layers, n_vocab, n, options)
    if options.split_mode == "none":
        owners = [options.main_gpu] * (len(layers) + 1)
    else:
        ranges = share_out(Dim(len(layers) + 1), normalise(options.shares, n))
        owners = [d for d, (begin, end) in enumerate(ranges) for _ in range(begin, end)]
    plans = [whole_on(layer, owner, n) for layer, owner in zip(layers, owners[:-1], strict=True)]
    return plans, Plan({"vocab": _whole(n_vocab, owners[-1], n)})


def _plans_of_hosts(
    layers: Sequence[Layer], n_vocab: int, n: int, options: Options
) -> tuple[list[Plan], Plan]:
    """Assign consecutive layers to each node, split over its devices. The output counts as a layer."""
    nodes, shares = options.nodes or ("",) * n, normalise(options.shares, n)
    parts = {
        node: tuple(s if of == node else 0.0 for of, s in zip(nodes, shares, strict=True)) for node in nodes
    }
    ranges = share_out(Dim(len(layers) + 1), [sum(part) for part in parts.values()])
    plans: list[Plan] = []
    output_plan = Plan({})
    for part, (begin, end) in zip(parts.values(), ranges, strict=True):
        if begin < end:
            of_layers, output_plan = plan_model(layers[begin:end], n_vocab, n, part, options.split_policy)
            plans += of_layers
    return plans, output_plan


def whole_on(layer: Layer, device: int, n: int) -> Plan:
    sizes: dict[str, int] = {}
    for mixer in layer.mixers:
        sizes |= mixer.sizes
    if (f := layer.ffn) is not None:
        sizes["ffn"] = f.n_ff_shared if f.n_expert else f.n_ff
    ranges = {name: _whole(size, device, n) for name, size in sizes.items() if size}
    return Plan(ranges, (_whole(f.n_ff, device, n),) * f.n_expert if f else ())


def _whole(size: int, device: int, n: int) -> Ranges:
    return tuple((0 if d <= device else size, size if d >= device else 0) for d in range(n))


def _override(
    specs: Sequence[WeightSpec],
    options: Options,
    plans: list[Plan],
    output_plan: Plan,
    layers: Sequence[Layer],
    n: int,
) -> tuple[dict[str, Home], list[Plan], Plan]:
    """Place tensors that match a pattern of -ot on the host or on a device.

    A pattern with a device index moves the complete attention or FFN of a layer, because its tensors need the
    same split.
    """
    plans = list(plans)
    homes: dict[str, Home] = {}
    patterns = [(text, _compile(text), target) for text, target in options.override_tensor]
    matched: set[str] = set()
    for spec in specs:
        stored = spec.part.tensor if spec.part else spec.name
        match = next(((text, target) for text, regex, target in patterns if regex.search(stored)), None)
        if match is None:
            continue
        text, target = match
        matched.add(text)
        if target.lower() in ("cpu", "host"):
            homes[spec.name] = Home.HOST
            continue
        if not target.isdecimal() or len(target) > 9 or int(target) >= n:
            raise InvalidArgument(
                f"override {text}={target}: the target must be CPU, host, or a device's place in -dev, "
                f"which is 0{f' to {n - 1}' if n > 1 else ''}"
            )
        if not spec.role.dim:
            continue  # a mirrored tensor is already on the device
        il = layer_of(spec.name)
        if il is None:
            output_plan = Plan({"vocab": _whole(spec.shape[0], int(target), n)})
            continue
        whole = whole_on(layers[il], int(target), n)
        attention = spec.role.dim not in ("ffn", "experts")
        dims = [dim for dim in whole.ranges if (dim != "ffn") == attention]
        plans[il] = replace(
            plans[il],
            ranges={**plans[il].ranges, **{dim: whole.ranges[dim] for dim in dims}},
            experts=plans[il].experts if attention else whole.experts,
        )
    for text, _, target in patterns:
        if text not in matched:
            names = ", ".join(spec.name for spec in specs if spec.role.dim)[:100].rpartition(",")[0]
            raise InvalidArgument(
                f"override {text}={target}: no tensor's name matches the pattern; names look like {names} "
                "(vkbackend info lists them all)"
            )
    return homes, plans, output_plan


def _compile(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise InvalidArgument(f"override pattern {text!r} is not a regular expression: {error}") from error


def weight_nbytes(load: Load, device: int) -> int:
    """Return a weight's bytes on a device, or 0 for a shared host table."""
    if load.shared:
        return 0
    cuts = expert_slices(load, device) if len(load.shape) == 3 else slices_of(load, device)
    return sum((r.stop - r.start) * row_nbytes(load.dtype, c.stop - c.start) for r, c in cuts)


def _file_nbytes(loads: Sequence[Load]) -> int:
    """Return the number of bytes of the complete weights."""
    return sum(prod(load.shape[:-1]) * row_nbytes(load.dtype, load.shape[-1]) for load in loads)


def adapters_nbytes(layout: Layout, device: int) -> int:
    return sum(weight_nbytes(load, device) for load in layout.loads if load.name in layout.adapters)


def sizes(layout: Layout) -> list[dict[str, int]]:
    """Return bytes per device without padding. `host` counts slices and caches on the host."""
    report = []
    for d in range(layout.n_devices):
        n: dict[str, int] = {"weights": 0, "kv": 0, "host": 0}
        for load in layout.loads:
            n["weights" if load.home is Home.WEIGHTS else "host"] += weight_nbytes(load, d)
        for plan in layout.memories():
            n["kv" if plan.home is Home.KV else "host"] += sum(plan.nbytes(d))
        report.append(n)
    return report


def largest_cache(layout: Layout, device: int) -> int:
    """Return the number of bytes of the largest cache array, which shaders bind as one range."""
    return max((max(cache.nbytes(device)) for cache in layout.memories()), default=0)
