"""Predicts mixtures that are larger than the cards: `python -m vkbackend.tools.studies.host_experts`.

Three machines have simulated cards of 24 GiB, whose memory reads 700 GB/s. All experts are in host memory,
and the cards' remaining memory is a cache of the most used experts. Prints the tokens per second that memory,
bus and RAM allow: without the cache; with the cache, for an even router and for Zipf's law; and with experts
on the CPU. An exchange between two cards is assumed to take 83 us. Handing a layer's missed experts to a CPU
device is assumed to take 83 us, too. The third table shows how fast the CPU device must read RAM to save
time. The last table counts the bytes that a prompt's step reads over the bus. Either each tile of pairs reads
its expert from host memory, or the step first copies all experts to device memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from vkbackend import env
from vkbackend.meta.rates import Rates
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.arguments import EXPERTS
from vkbackend.models.options import Options
from vkbackend.models.placement.expert_use import Used, even, resident, tiles_read, zipf
from vkbackend.models.placement.mixture_plan import RAM
from vkbackend.models.placement.tensors import check_weights
from vkbackend.ops import tile_size
from vkbackend.runtime import Device
from vkbackend.tools.flags.assumed import Assumed
from vkbackend.tools.measure.simulated import Hollow, SimulatedDevice
from vkbackend.tools.measure.turns import exit_on_errors, table, variable
from vkbackend.tools.plan_mixture import Mixture
from vkbackend.tools.plan_report import plan_of

MODELS = ("gpt-oss-120b:MXFP4", "qwen3.5-122b-a10b:Q4_K")
CARD_NBYTES, WEIGHTS, EXCHANGE_S = 24 << 30, 700e9, 83e-6
N_CTX = 8192
ROUTERS: dict[str, Callable[[int, int], Used]] = {
    "even": even,
    "Zipf 0.7": partial(zipf, exponent=0.7),
    "Zipf 1": zipf,
}


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    n_cards: int
    bus: float  # bytes per second of each card
    ram: str  # a key of mixture_plan.RAM


MACHINES = (
    Machine("one card, PCIe 3.0 x16, DDR4", 1, 12e9, "DDR4"),
    Machine("one card, PCIe 4.0 x16, DDR4", 1, 25e9, "DDR4"),
    Machine("two cards, PCIe 4.0 x8 each, DDR5", 2, 12.5e9, "DDR5"),
)
TOKENS = ("machine", "model", "GB a token", "no cache", "experts cached", *ROUTERS, "CPU", "CPU, even cache")
CPU = ("machine", "model", *ROUTERS, "RAM at most")
PROMPTS = (
    *("machine", "model", "-ub", "scratch MiB", "bus MiB a token", "at most tokens/s"),
    "if the GPU caches no host memory",
)


STEP_ROWS = 512, 1024, 2048, 4096
STEPS = ("model", "experts cached", "router", "-ub", "copied first", "in place", "in place, with the cache")


def mixture(machine: Machine, spec: str) -> Mixture:
    devices: list[Device] = [SimulatedDevice(i, CARD_NBYTES) for i in range(machine.n_cards)]
    gguf = Hollow(spec)
    model = load_model(gguf)
    options = Options.of(
        spec,
        devices=[device.name for device in devices],
        n_ctx=N_CTX,
        n_ubatch=2048,
        use_mmap=False,
        tensor_split=[1] * machine.n_cards,
        override_tensor=((EXPERTS, "CPU"),),
    )
    assumed = Assumed((Rates(WEIGHTS, machine.bus, EXCHANGE_S),), ())
    planned = plan_of(model, check_weights(gguf, model), devices, options, None, assumed).mixture
    assert planned
    return planned


def break_even(missed: float, bus: float, n_layer: int) -> float | None:
    """Return the bytes per second at which a CPU device must read `missed` bytes per token to be as fast as a
    bus of `bus` bytes per second. Return None if handing over takes longer than the bus."""
    left = missed / bus - n_layer * EXCHANGE_S
    return missed / left if left > 0 else None


@dataclass(frozen=True, slots=True)
class Rows:
    token: tuple[object, ...]
    prompts: list[tuple[object, ...]]
    cpu: tuple[object, ...]
    steps: list[tuple[object, ...]]


def steps_of(planned: Mixture, spec: str) -> list[tuple[object, ...]]:
    """Return rows with the GB that a step reads over the bus if it copies all experts, and if tiles read
    experts from host memory, without and with the cache. Copies cannot leave out the cached experts, because
    a recorded step never changes."""
    plan, n_slots = planned.plan, planned.caches[-1].n_slots
    n_expert, n_used, limits = plan.n_experts, plan.model.n_used, SimulatedDevice(0, CARD_NBYTES).limits
    steps: list[tuple[object, ...]] = []
    for name, router in ROUTERS.items():
        used = router(n_expert, n_used)
        missed = np.where(resident(used, n_slots), 0, used)
        for n_rows in STEP_ROWS:
            tile = tile_size(limits, n_rows, n_used, n_expert) or 1
            experts = (n_expert, *(tiles_read(of, n_rows, tile) for of in (used, missed)))
            gb = (f"{n * plan.slot_nbytes / 1e9:.1f}" for n in experts)
            steps.append((spec, n_slots, name, n_rows, *gb))
    return steps


def rows_of(machine: Machine, spec: str) -> Rows:
    planned = mixture(machine, spec)
    plan, none, most = planned.plan, planned.caches[0], planned.caches[-1]
    cached = [
        replace(plan, used=[router(len(used), plan.model.n_used) for used in plan.used]).with_cache(
            most.n_slots
        )
        for router in ROUTERS.values()
    ]
    token: list[object] = [machine.name, spec, none.bus * machine.n_cards / 1e9, per_s(none.times.total_ms)]
    token.append(f"{most.n_slots} of {plan.n_experts}")
    token += [f"{per_s(row.times.total_ms)} ({100 * row.hit_rate:.0f} %)" for row in cached]
    token += [per_s(row.cpu_ms[machine.ram]) for row in (none, most)]
    prompts: list[tuple[object, ...]] = [
        (
            machine.name,
            spec,
            row.n_rows,
            row.scratch / 2**20,
            row.bus[0] / 2**20,
            f"{row.at_most[0]:.0f}",
            f"{row.at_most_of_tiles:.0f}",
        )
        for row in planned.steps
    ]
    missed = [row.bus * machine.n_cards for row in cached]
    must = [break_even(n, machine.bus * machine.n_cards, len(plan.used)) for n in missed]
    shown = [f"{n / 1e9:.2f}: {rate / 1e9:.0f}" if rate else f"{n / 1e9:.2f}: never"
             for n, rate in zip(missed, must, strict=True)]  # fmt: skip
    cpu = (machine.name, spec, *shown, RAM[machine.ram] / 1e9)
    return Rows(tuple(token), prompts, cpu, steps_of(planned, spec))


def per_s(ms: float) -> str:
    return f"{1e3 / ms:.1f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help="shapes (default: %(default)s)")
    args = parser.parse_args(argv)
    rows = []
    with exit_on_errors(), variable(env.CACHE, "off"):  # a simulated card has no measured speed
        for machine in MACHINES:
            for spec in args.models.split(","):
                sys.stderr.write(f"{machine.name}, {spec}\n")
                rows.append(rows_of(machine, spec))
        table("Tokens per second (hit rate)", TOKENS, [row.token for row in rows])
        table("Prompts, without a cache", PROMPTS, [step for row in rows for step in row.prompts])
        title = "GB missed per token: GB/s of RAM that a CPU device must read to be as fast as the bus"
        table(title, CPU, [row.cpu for row in rows])
        title = f"GB that a step reads over the bus, {MACHINES[1].name}"
        n = len(args.models.split(","))
        table(title, STEPS, [step for row in rows[n : 2 * n] for step in row.steps])
    return 0


if __name__ == "__main__":
    sys.exit(main())
