"""Chooses the rows of a step if the user does not.

A step reads every weight of a dense layer once. A step of 512 rows also reads nearly every expert. Weights in
host memory cross the bus in each step, so steps with four times as many rows transfer a quarter of the bytes
per row. Weights in device memory are read so fast that larger steps would save no time and need more scratch
memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vkbackend.buffer import Home
from vkbackend.meta.step_kind import bucket
from vkbackend.models.architectures.base import Model
from vkbackend.models.options import DEFAULT_ROWS, Options
from vkbackend.models.placement.fit import ON_DEVICE, Budget, fits, sizes_with, with_fitting_layers
from vkbackend.models.placement.layout import Layout, layer_of, layouts
from vkbackend.models.placement.pinned import with_pinned_size
from vkbackend.models.placement.traced_steps import fitting_steps, most_rows
from vkbackend.runtime import Device

OVER_BUS = 2048, 1024  # Rows to try, if weights of layers are in host memory.
# Steps get more rows only if `-ngl auto` then keeps at least this share of the layers that it keeps on the
# devices with DEFAULT_ROWS.
KEPT_LAYERS = 0.9


def reads_over_bus(layout: Layout) -> bool:
    """Return whether weights of layers are in host memory."""
    return any(load.home is not Home.WEIGHTS and layer_of(load.name) is not None for load in layout.loads)


def chosen_rows(
    model: Model,
    types: Mapping[str, str],
    devices: Sequence[Device],
    options: Options,
    budgets: Sequence[Budget],
    halves: bool = False,
) -> int:
    """Return the number of rows of the largest step if `n_ubatch` is 0."""
    if options.n_gpu_layers is None and not options.override_tensor:
        return DEFAULT_ROWS
    limits, layout_of = [device.limits for device in devices], layouts(model, types, len(devices))

    def planned(n: int) -> tuple[Options, bool]:
        """Return the options with steps of `n` rows, and whether they fit."""
        wanted = replace(options, n_ubatch=n)
        layout = layout_of(wanted)
        shape, steps = fitting_steps(model, layout, wanted, limits, n, halves=halves)
        sizes = sizes_with(layout_of, devices, steps)
        if options.n_gpu_layers == "auto":
            wanted = with_fitting_layers(devices, wanted, sizes, model.n_layer)
            layout = layout_of(wanted)
        on_host = [budget for budget in budgets if budget.homes != ON_DEVICE]
        wanted = with_pinned_size(wanted, layout, sizes, on_host)
        return wanted, shape.n_rows >= n and fits(wanted, sizes, budgets)

    few = replace(options, n_ubatch=DEFAULT_ROWS)
    if options.n_gpu_layers == "auto":
        few, _ = planned(DEFAULT_ROWS)
    if not reads_over_bus(layout_of(few)):
        return DEFAULT_ROWS
    most = min(most_rows(model), bucket(options.n_ctx * options.n_slots))
    for n in dict.fromkeys(min(n, most) for n in OVER_BUS):
        if n > DEFAULT_ROWS:
            more, fit = planned(n)
            if fit and _layers(more, model) >= KEPT_LAYERS * _layers(few, model):
                return n
    return DEFAULT_ROWS


def _layers(options: Options, model: Model) -> int:
    return options.n_gpu_layers if isinstance(options.n_gpu_layers, int) else model.n_layer + 1
