"""Shows the cost of experts in host memory, for `vkbackend plan`. One table compares the times of a token
without a cache of experts, with caches of the most used experts, and with experts on the CPU. Another table
shows a prompt's time by the number of rows in a step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from vkbackend.figures import short
from vkbackend.meta.balance import Prediction
from vkbackend.models.architectures.base import Model
from vkbackend.models.experts.uses import Uses
from vkbackend.models.options import Options
from vkbackend.models.placement.cache_size import with_cache_size
from vkbackend.models.placement.cost import cost_of, stages_of
from vkbackend.models.placement.expert_use import Used, even, of_counts
from vkbackend.models.placement.layout import Layout, lay_out, slots_in
from vkbackend.models.placement.mixture_plan import RAM, CacheRow, MixturePlan, StepRow
from vkbackend.models.placement.traced_steps import fitting_steps
from vkbackend.ops import tile_size
from vkbackend.runtime import Device
from vkbackend.tools.console import MIB, table

STEP_ROWS = 512, 2048, 4096


@dataclass(frozen=True, slots=True)
class Mixture:
    """`caches` begins with no cache and ends with the largest that fits. If `counted` is set, the hit rates
    come from counts of earlier runs. Otherwise the router is assumed to be even."""

    plan: MixturePlan
    counted: bool
    caches: tuple[CacheRow, ...]
    steps: tuple[StepRow, ...]

    def to_json(self) -> dict[str, Any]:
        caches = [asdict(row) | {"ms": row.times.total_ms} for row in self.caches]
        uses = "counts of earlier runs" if self.counted else "an even router"
        return {"n_experts": self.plan.n_experts, "uses": uses, "caches": caches,
                "steps": [asdict(row) for row in self.steps]}  # fmt: skip


def used_experts(model: Model, layout: Layout, fingerprint: str) -> tuple[list[Used], bool]:
    """Return how often each layer's experts are used, and whether these are counts of earlier runs. If not,
    the router is assumed to be even."""
    sizes = [loads[0].shape[0] for loads in layout.stacks.values()]
    uses = Uses(list(layout.stacks), sizes)
    if fingerprint and uses.load(fingerprint):
        return [of_counts(of_layer, model.n_used) for of_layer in uses.of_layers], True
    return [even(n, model.n_used) for n in sizes], False


def mixture_of(
    model: Model,
    types: Mapping[str, str],
    devices: Sequence[Device],
    options: Options,
    prediction: Prediction,
    fingerprint: str,
    *,
    halves: bool,
    resources: Sequence[Hashable],
) -> Mixture | None:
    """Return None if no experts are in host memory. `resources` are labels of devices that share a speed."""
    n, limits = len(devices), [device.limits for device in devices]
    layout = lay_out(model, types, n, replace(options, moe_cache_mib=0.0, pinned_mib="auto"))
    if not layout.stacks:
        return None
    used, counted = used_experts(model, layout, fingerprint)
    cost = replace(cost_of(model, layout, ()), stages=stages_of(options, n))
    reduce_ms = prediction.times.reduce_ms
    plan = MixturePlan(model, layout, cost, prediction.speeds, resources, reduce_ms, used)
    auto = replace(options, moe_cache_mib="auto", pinned_mib="auto")
    fitting = with_cache_size(model, types, devices, auto, options.n_ubatch, halves=halves)
    wanted = {slots_in(layout.stacks, n, of.moe_cache_nbytes) for of in (options, fitting)}
    slots = sorted({0, *(min(of, plan.n_experts) for of in wanted)})
    steps = []
    for rows in sorted({*STEP_ROWS, options.n_ubatch}):
        shape, sizes = fitting_steps(model, layout, options, limits, rows, halves=halves)
        if shape.n_rows == rows:
            scratch = max(sizes.scratch(d) for d in range(n))
            tile = tile_size(limits[0], rows, model.n_used, plan.n_experts) or 1
            steps.append(plan.steps(rows, slots[-1], scratch, tile))
    return Mixture(plan, counted, tuple(map(plan.with_cache, slots)), tuple(steps))


def show_mixture(out: Console, mixture: Mixture) -> None:
    rows = [
        (
            *(row.nbytes / MIB, f"{row.n_slots} of {mixture.plan.n_experts}", short(100 * row.hit_rate)),
            *(row.bus / MIB, short(1e3 / row.times.total_ms)),
            *(short(1e3 / row.cpu_ms[kind]) for kind in RAM),
        )
        for row in mixture.caches
    ]
    uses = "counts of earlier runs" if mixture.counted else "an even router"
    cpus = [f"on the CPU, {kind} {rate / 1e9:g} GB/s" for kind, rate in RAM.items()]
    head = ("cache MiB", "experts a layer", "hit %", "bus MiB a token", "tokens/s", *cpus)
    out.print(table(f"experts in host memory, hit rates of {uses}", head, rows))
    steps = [
        (
            *(row.n_rows, row.scratch / MIB),
            *(n / MIB for n in (*row.bus, row.bus_of_tiles)),
            *("-" if rate is None else f"{rate:.4g}" for rate in (*row.at_most, row.at_most_of_tiles)),
        )
        for row in mixture.steps
    ]
    ways = ("with the largest cache", "if the GPU caches no host memory")
    names = ("bus MiB a token", *ways, "at most tokens/s", *ways)
    out.print(table("prompts in steps of several sizes", ("-ub", "scratch MiB", *names), steps))
