"""Computes the exact bytes on every device before memory is allocated.

The loader, the caches and the mesh allocate these sizes. Including padding, the sizes equal the allocator's
counters. Weights that software devices read from the mapped file (`mapped`) count for each device.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from vkbackend.buffer import Home, aligned, nbytes_of
from vkbackend.formats import row_nbytes
from vkbackend.memory import packed
from vkbackend.meta.expert_slots import slot_views
from vkbackend.meta.options import ReduceOptions
from vkbackend.meta.sizing import StepSizes
from vkbackend.meta.slices import Load, mapped_pieces, own_pieces, piece_nbytes, rows_in_pieces
from vkbackend.meta.staged_experts import staged_nbytes, streamed_stacks
from vkbackend.meta.streamed_weights import n_regions, region_nbytes
from vkbackend.meta.ways import slots_nbytes
from vkbackend.models.placement.layout import Layout, adapters_nbytes, largest_cache, weight_nbytes
from vkbackend.runtime import FLAG_NBYTES, Device

HOMES = ("weights", "mapped", "kv", "scratch", "host", "stream", "shared", "staging")
ITEMS = (
    "model",
    "mirrored",
    "replicated",
    "adapters",
    "slots",
    "stream",
    "kv",
    "tables",
    "scratch",
    "staging",
    "padding",
)


USUAL = ReduceOptions()


@dataclass(slots=True)
class Held:
    """Bytes on one device, in `homes` by kind of memory (as allocated) and in `items` by purpose. Host pages
    that all devices read (`shared`) count for the first device."""

    homes: Counter[str] = field(default_factory=Counter)
    items: Counter[str] = field(default_factory=Counter)
    largest_cache: int = 0

    def add(self, home: str, item: str, nbytes: int, allocated: int | None = None) -> None:
        allocated = aligned(nbytes) if allocated is None else allocated
        self.homes[home] += allocated
        self.items[item] += nbytes
        self.items["padding"] += allocated - nbytes


def allocations(
    layout: Layout, devices: Sequence[Device], steps: StepSizes, how: ReduceOptions = USUAL
) -> list[Held]:
    """`items` counts all copies of weights as `weights`, and all copies of adapters as `adapters`."""
    return with_caches(without_caches(layout, devices, steps, how), layout)


def without_caches(
    layout: Layout, devices: Sequence[Device], steps: StepSizes, how: ReduceOptions = USUAL
) -> list[Held]:
    """Raises UnsupportedFeature if the devices cannot follow the options."""
    how.check(devices, steps.slot)
    report = [Held() for _ in devices]
    _, signal = how.relaying(devices)
    slots = slots_nbytes(how.reduce_provider, devices, steps.slot)
    for d, (device, held) in enumerate(zip(devices, report, strict=True)):
        _add_weights(held, layout, d, device)
        held.add("scratch", "scratch", steps.scratch(d))
        held.add("staging", "staging", steps.staging(d))
        held.add("staging", "staging", *slots[d])
        if "flag" in signal and signal in device.queue.signals:
            held.add("staging", "staging", FLAG_NBYTES)
    _add_shared(report, layout, devices)
    return report


def with_caches(report: Sequence[Held], layout: Layout) -> list[Held]:
    """Return copies of `report` with the caches of `layout`."""
    whole = []
    for d, held in enumerate(report):
        whole.append(Held(held.homes.copy(), held.items.copy(), largest_cache(layout, d)))
        _add_caches(whole[-1], layout, d)
    return whole


def _add_weights(held: Held, layout: Layout, d: int, device: Device) -> None:
    most, limit = piece_nbytes(device), device.limits.max_allocation_nbytes
    add_loads(held, layout.loads, d, device)
    if regions := n_regions(layout.loads) * sum(region_nbytes(layout.loads, d, device)):
        held.add("stream", "stream", regions)
    if staged := staged_nbytes(streamed_stacks(layout.stacks, layout.tables), d):
        held.add("stream", "stream", staged)
    slots = slot_views(layout.stacks, layout.tables, d, most)
    if slots:
        nbytes = sum(nbytes_of(shape, dtype) for shape, dtype in slots)
        held.add("weights", "slots", nbytes, sum(packed(slots, limit).chunks))
    adapters = adapters_nbytes(layout, d)
    held.items.update(adapters=adapters, weights=-adapters)


def add_loads(held: Held, loads: Sequence[Load], d: int, device: Device) -> None:
    """Add device `d`'s weights, with the tables of their formats."""
    most, limit = piece_nbytes(device), device.limits.max_allocation_nbytes
    mapped = _add_mapped(held, loads, d, device)
    for home in (Home.WEIGHTS, Home.HOST):
        of_home = [load for load in loads if load.home is home and load.name not in mapped]
        nbytes = sum(weight_nbytes(load, d) for load in of_home)
        views = [(shape, load.dtype) for load, _, shape in own_pieces(of_home, d, most)]
        held.add(home.value, "weights", nbytes, sum(packed(views, limit).chunks))
    read = [load for load in loads if load.shared or weight_nbytes(load, d)]
    for load in read:
        if len(load.shape) == 3:
            held.add("weights", "tables", 4 * (load.shape[0] + 1))
    if device.has_codebooks:
        from vkbackend.codebooks import entries, owner_of  # imports the Vulkan loader

        for name in {owner for load in read if (owner := owner_of(load.dtype))}:
            held.add("weights", "tables", entries(name).nbytes)


def _add_mapped(held: Held, loads: Sequence[Load], d: int, device: Device) -> set[str]:
    names = set()
    for load in loads:
        for _, shape, _ in mapped_pieces(load, d, device):
            nbytes = math.prod(shape[:-1]) * row_nbytes(load.dtype, shape[-1])
            held.add("mapped", "weights", nbytes, aligned(nbytes, 4))
            names.add(load.name)
    return names


def _add_caches(held: Held, layout: Layout, d: int) -> None:
    for cache in layout.memories():
        for nbytes in cache.nbytes(d):
            held.add("kv" if cache.home is Home.KV else "host", "kv", nbytes)
    for cache in {cache.ring: cache for cache in layout.caches}.values():
        held.add("kv", "tables", 4 * cache.n_slots * cache.width)


def _add_shared(report: Sequence[Held], layout: Layout, devices: Sequence[Device]) -> None:
    """Devices that can import host pages share one copy of shared tables. Every other device has its own
    copy, unless it reads the mapped file."""
    page = max(device.limits.host_import_align for device in devices)
    for load in layout.loads:
        sharing = [d for d, device in enumerate(devices) if not mapped_pieces(load, d, device)]
        if not load.shared or not sharing:
            continue
        nbytes = stored_nbytes(load)
        if any(devices[d].imports_pages for d in sharing):
            report[0].add("shared", "weights", nbytes, aligned(nbytes, page))
        for d in sharing:
            if not devices[d].imports_pages:
                views = [(shape, load.dtype) for _, shape in rows_in_pieces(load, piece_nbytes(devices[d]))]
                chunks = packed(views, devices[d].limits.max_allocation_nbytes).chunks
                report[d].add("host", "weights", nbytes, sum(chunks))


def itemised(layout: Layout, report: Sequence[Held]) -> dict[str, int]:
    """Return the sum of each of ITEMS over all devices, and the total as `held`.

    `model` counts each weight once, except weights that stay in the file. `mirrored` counts additional copies
    of mirrored tensors. `replicated` counts additional copies of split tensors' parts. `adapters` counts all
    copies of low-rank adapters.
    """
    total: Counter[str] = sum((held.items for held in report), Counter())
    weights = [
        load for load in layout.loads if load.name not in layout.adapters and load.home is not Home.STREAM
    ]
    model = sum(map(stored_nbytes, weights))
    replicated = sum(
        sum(weight_nbytes(load, d) for d in range(layout.n_devices)) - stored_nbytes(load)
        for load in weights
        if load.state.ranges
    )
    parts = {item: total[item] for item in ITEMS}
    parts |= {"model": model, "replicated": replicated, "mirrored": total["weights"] - model - replicated}
    return parts | {"held": sum(sum(held.homes.values()) for held in report)}


def stored_nbytes(load: Load) -> int:
    return math.prod(load.shape[:-1]) * row_nbytes(load.dtype, load.shape[-1])
