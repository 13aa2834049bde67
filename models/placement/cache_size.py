"""Chooses the size of an expert cache from the devices' free memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vkbackend.models.architectures.base import Model
from vkbackend.models.options import Options
from vkbackend.models.placement.fit import Budget, budgets_of, fits, largest, mib, sizes_with
from vkbackend.models.placement.layout import Layout, layouts, slot_nbytes_of
from vkbackend.models.placement.traced_steps import fitting_steps
from vkbackend.runtime import Device

MIB = 1 << 20


def with_cache_size(
    model: Model,
    types: Mapping[str, str],
    devices: Sequence[Device],
    options: Options,
    n_ubatch: int,
    *,
    halves: bool,
    reuse: bool = True,
    budgets: Sequence[Budget] | None = None,
) -> Options:
    """Replace a `moe_cache_mib` of "auto" by the size of all slots that fit in the remaining memory. On numpy
    devices, all experts fit, because their memory has no limit. Software devices get no slots, because their
    memory is host memory. `budgets` replaces the devices' free memory."""
    if options.moe_cache_mib != "auto":
        return options
    without = replace(options, moe_cache_mib=0.0)
    if all(device.limits.is_cpu for device in devices):
        return without
    layout_of = layouts(model, types, len(devices))
    layout = layout_of(without)
    of_each = slot_nbytes_of(layout.stacks, len(devices))
    if not of_each:
        return without
    most = max(stacks[0].shape[0] for stacks in layout.stacks.values())

    def sized(n_slots: int) -> Options:
        return replace(options, moe_cache_mib=n_slots * of_each / MIB)

    limits = [device.limits for device in devices]
    full = layout_of(sized(most))
    _, steps = fitting_steps(model, full, options, limits, n_ubatch, halves=halves, reuse=reuse)
    sizes = sizes_with(layout_of, devices, steps)
    budgets = budgets_of(devices) if budgets is None else budgets
    return sized(largest(1, most, lambda n: fits(sized(n), sizes, budgets)))


def cache_notes(options: Options, layout: Layout, n_devices: int) -> list[str]:
    if not options.moe_cache_mib:
        return []
    of_each = slot_nbytes_of(layout.stacks, n_devices)
    if not of_each:
        return ["moe_cache_mib has no effect: no experts are in host memory (-cmoe puts them there)"]
    if not layout.tables:
        return [f"the expert cache is off: an expert of each layer takes {mib(of_each)}"]
    largest_table = max(layout.tables.values(), key=lambda table: table.n_experts)
    n_slots, n_experts = largest_table.n_slots, largest_table.n_experts
    return [f"{n_slots} of {n_experts} experts per layer are cached in {mib(n_slots * of_each)}"]
