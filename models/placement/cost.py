"""Computes the cost of a token under a layout, in bytes and all-reduces, without opening a device. The
automatic split and `vkbackend plan` use this cost."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from vkbackend.buffer import Home
from vkbackend.limits import Limits
from vkbackend.meta.balance import Cost, Shares
from vkbackend.meta.reduce import Reduce
from vkbackend.meta.slices import Load
from vkbackend.models.architectures.base import Model
from vkbackend.models.options import Options
from vkbackend.models.placement.layout import (
    Layout,
    lay_out,
    layer_of,
    sizes,
    weight_nbytes,
)
from vkbackend.models.placement.traced_steps import step_shape, step_sizes, trace_reduces

FUSION = ".fc.weight"  # a weight of an EAGLE-3 head that steps of the model read, but not steps of the head


class CostFunction(Protocol):
    def __call__(self, shares: Shares, n_rows: int = 1) -> Cost: ...


def cost_function(
    model: Model,
    types: Mapping[str, str],
    options: Options,
    limits: Sequence[Limits],
    n_ubatch: int = 512,
) -> CostFunction:
    """Return a function that maps shares (one per device, in any unit) and the number of rows of a step to
    the cost of a step.

    Devices without a share are left out. All-reduces are traced once per set of devices with a share. Scratch
    memory is traced only once, because tracing a large model takes seconds. The largest scratch size counts
    for every device. With fewer devices, this size grows in proportion.
    """
    traced: dict[tuple[bool, ...], list[Reduce]] = {}
    known: dict[tuple[Shares, int], Cost] = {}
    stages = stages_of(options, len(limits))
    scratch = 0

    def cost(shares: Shares, n_rows: int = 1) -> Cost:
        key = tuple(shares), n_rows
        if key not in known:
            known[key] = computed(*key)
        return known[key]

    def computed(shares: Shares, n_rows: int) -> Cost:
        nonlocal scratch
        layout = lay_out(model, types, len(limits), replace(options, tensor_split=tuple(shares)))
        # -ot may place tensors on a device without a share.
        busy = tuple(share > 0 or layout.holds(d) for d, share in enumerate(shares))
        if not scratch:
            shape = step_shape(model, layout, options, n_ubatch)
            steps = step_sizes(model, layout, options, limits, shape)
            scratch = sum(busy) * max(steps.scratch(d) for d in range(layout.n_devices))
        if busy not in traced:
            traced[busy] = trace_reduces(model, layout, options, limits)
        per_device = scratch // sum(busy)
        across: list[int] = []
        inside: list[int] = []  # bytes of each sum within a node
        for r in traced[busy]:
            alone = options.split_mode == "hosts" and len({stages[d] for d in r.writers + r.readers}) == 1
            (inside if alone else across).append(4 * r.elements * n_rows)
        whole = cost_of(model, layout, tuple(across), n_rows)
        held, read, host = (
            tuple(n if used else 0 for n, used in zip(nbytes, busy, strict=True))
            for nbytes in ([n + per_device for n in whole.held], whole.read, whole.host)
        )
        return Cost(held, read, host, whole.reduces, tuple(inside), stages, whole.n_layers)

    return cost


def stages_of(options: Options, n: int) -> tuple[Hashable, ...]:
    """Devices with equal labels compute at the same time."""
    if options.split_mode == "layer":
        return tuple(range(n))
    return (options.split_mode == "hosts" and options.nodes) or (0,) * n


def cost_of(model: Model, layout: Layout, reduces: tuple[int, ...], n_rows: int = 1) -> Cost:
    n = layout.n_devices
    read = {Home.WEIGHTS: [0] * n, Home.HOST: [0] * n}
    for load in layout.loads:
        if (il := layer_of(load.name)) is not None and il >= model.n_layer - model.n_ahead:
            # A step without drafts reads only the head's matrices of k and v, which are small, and fc.
            if not load.name.endswith(FUSION):
                continue
        for d in range(n):
            read[Home.WEIGHTS if load.home is Home.WEIGHTS else Home.HOST][d] += _read_nbytes(
                model, load, d, n_rows
            )
    held = tuple(size["weights"] + size["kv"] for size in sizes(layout))
    n_layers = model.n_layer - model.n_ahead
    return Cost(held, tuple(read[Home.WEIGHTS]), tuple(read[Home.HOST]), reduces, n_layers=n_layers)


def read_by_head(model: Model, layout: Layout) -> list[int]:
    """Return the number of bytes of weights that each device reads for one token of the head."""
    names, prefix = {load.name for load in layout.loads}, f"blk.{model.n_layer - 1}."
    own = {f"{prefix}nextn.shared_head_head.weight", f"{prefix}output.weight"} & names
    of_layer = [load for load in layout.loads if load.name.startswith(prefix)]
    loads = [load for load in of_layer if not load.name.endswith(FUSION)]
    loads += [load for load in layout.loads if load.name == "output.weight" and not own]
    loads = [load for load in loads if load.home is Home.WEIGHTS]
    return [sum(_read_nbytes(model, load, d) for load in loads) for d in range(layout.n_devices)]


def bus_bytes_per_row(model: Model, layout: Layout, n_rows: int) -> list[float]:
    """Return the bytes of weights in host memory that each device reads per row of a step."""
    loads = [load for load in layout.loads if load.home is not Home.WEIGHTS]
    return [
        sum(_read_nbytes(model, load, d, n_rows) for load in loads) / n_rows for d in range(layout.n_devices)
    ]


def _read_nbytes(model: Model, load: Load, device: int, n_rows: int = 1) -> int:
    """Return the number of bytes that a step reads of a weight. All rows of a step together read a matrix
    once. If the router chooses all E experts equally often, n rows of k experts each read E (1 - (1 - k /
    E)^n) experts of a stack."""
    nbytes, n_experts = weight_nbytes(load, device), load.shape[0]
    if len(load.shape) < 3:
        return nbytes
    return round(nbytes * (1 - (1 - model.n_used / n_experts) ** n_rows))
