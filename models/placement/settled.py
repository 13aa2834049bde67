"""Chooses the options that the user did not set: the rows of a step, the layers on the devices, pinned
weights and copies of experts. The devices are already open. Loading and `vkbackend plan` share these
decisions, so a plan shows what is loaded. The devices' shares are chosen earlier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vkbackend.errors import InvalidArgument
from vkbackend.meta.sizing import StepShape, StepSizes
from vkbackend.meta.step_kind import bucket
from vkbackend.models.architectures.base import Model
from vkbackend.models.options import DEFAULT_ROWS, Options
from vkbackend.models.placement.cache_size import cache_notes, with_cache_size
from vkbackend.models.placement.fit import (
    Budget,
    Sizes,
    budgets_of,
    host_budgets,
    sizes_with,
    with_fitting_layers,
)
from vkbackend.models.placement.layout import Layout, layouts
from vkbackend.models.placement.pinned import stream_notes, with_pinned_size
from vkbackend.models.placement.resident import Resident
from vkbackend.models.placement.step_rows import chosen_rows
from vkbackend.models.placement.traced_steps import fitting_steps, most_rows
from vkbackend.runtime import Device


@dataclass(frozen=True, slots=True)
class Settled:
    """A step has at most `n_ubatch` rows. `sizes` returns the memory that other options would need. `notes`
    are for the user. `halves` is set if large steps are computed as two halves, which alternate."""

    options: Options
    n_ubatch: int
    layout: Layout
    shape: StepShape
    steps: StepSizes
    sizes: Sizes
    halves: bool
    notes: tuple[str, ...]


def row_limit(model: Model, options: Options) -> int:
    """Return the maximum number of rows of a step, before its memory is known."""
    rows = options.n_ubatch or DEFAULT_ROWS
    return min(rows, bucket(options.n_ctx * options.n_slots), most_rows(model))


def settle(
    model: Model,
    types: Mapping[str, str],
    devices: Sequence[Device],
    options: Options,
    *,
    halves: bool,
    reuse: bool = True,
    budgets: Sequence[Budget] | None = None,
    residents: Sequence[Resident] = (),
    alone: bool = True,
) -> Settled:
    """`budgets` replace the free memory of the devices, which `residents` share. `alone` is False for nodes
    of a group, which do not know each other's memory. Raises InvalidArgument for options that need this
    memory."""
    limits, notes = [device.limits for device in devices], list[str]()
    if not options.n_ubatch:
        room = [*(budgets_of(devices) if budgets is None else budgets), *host_budgets(devices, residents)]
        rows = chosen_rows(model, types, devices, options, room, halves) if alone else DEFAULT_ROWS
        options = replace(options, n_ubatch=rows)
    layout_of = layouts(model, types, len(devices))
    layout = layout_of(options)
    n_ubatch = row_limit(model, options)

    def steps_of(halves: bool) -> tuple[StepShape, StepSizes]:
        return fitting_steps(model, layout, options, limits, n_ubatch, halves=halves, reuse=reuse)

    shape, steps = steps_of(halves)
    if shape.n_rows < n_ubatch:
        notes.append(f"a device cannot bind the values of -ub {n_ubatch}; a step has {shape.n_rows}")
        n_ubatch = shape.n_rows
    sizes = sizes_with(layout_of, devices, steps)
    if options.n_gpu_layers == "auto":
        options = with_fitting_layers(devices, options, sizes, model.n_layer, budgets)
        layout = layout_of(options)
        n = options.n_gpu_layers if isinstance(options.n_gpu_layers, int) else model.n_layer + 1
        notes.append(f"{n} of {model.n_layer + 1} layers, the output counted, fit the devices")
    if alone:
        options = with_pinned_size(options, layout, sizes, host_budgets(devices, residents))
        layout = layout_of(options)
    halves = halves and not layout.streamed  # The host would copy a layer for each half.
    if options.moe_cache_mib == "auto":
        if not alone:
            raise InvalidArgument(
                "moe_cache_mib='auto' does not know the memory of several hosts; give a number of MiB"
            )
        sizing = {"halves": halves, "reuse": reuse}
        options = with_cache_size(model, types, devices, options, n_ubatch, **sizing, budgets=budgets)
        if not options.moe_cache_mib:
            notes.append("no experts are cached: none is in host memory, or software devices compute")
        layout = layout_of(options)
    if (layout.experts, layout.streamed) != (shape.experts, shape.streamed):
        shape, steps = steps_of(halves)
        sizes = sizes_with(layout_of, devices, steps)
    notes += cache_notes(options, layout, len(devices))
    in_file = sum(held.homes["stream"] for held in sizes(options))
    notes += stream_notes(layout, in_file)
    return Settled(options, n_ubatch, layout, shape, steps, sizes, halves, tuple(notes))
