"""Computes the demands of large models, without a card: `python -m vkbackend.tools.studies.scale`.

Plans, lays out and records models of 8B, 70B and 235B weights on 1, 2, 4 and 8 simulated devices
(tools/measure/simulated.py). Each combination runs in its own process. Prints the CPU seconds of a start and
of recording a step. Recording equal layers once alternates with recording every layer. Also prints the memory
of a card, and the longest context that fits in 8, 16 and 24 GiB.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import time
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from vkbackend import env
from vkbackend.buffer import Home
from vkbackend.checks import number_of, whole_number
from vkbackend.meta.recorded_steps import Step
from vkbackend.meta.step_kind import StepKind
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.options import Options
from vkbackend.models.placement.fit import RESERVE
from vkbackend.models.placement.traced_steps import in_halves
from vkbackend.recording import Cut, Dispatch, Pace, Recording, cut_long
from vkbackend.tools.measure.simulated import Hollow, SimulatedDevice
from vkbackend.tools.measure.turns import exit_on_errors, table, variable

MODELS = ("llama-8b:Q4_K", "llama-70b:Q4_K", "qwen3-235b-a22b:Q4_K")
COUNTS = (1, 2, 4, 8)
MEMORY_GIB = (8, 16, 24)
N_CTX, N_PROMPT = 131_072, 512
TURNS = 3  # recordings of a step
ROOM_NBYTES = 1 << 40  # Every model fits in a simulated card. MEMORY_GIB lists real sizes.
MEASURED = Pace(400e9 / 4, 20e9 / 4)  # A card reads 400 GB/s. known_speed.py assumes a quarter of this.

HOST = (
    *("model", "cards", "start s", "token s", "every layer", "prompt s", "every layer", "host MiB"),
    *("KiB of a token's step", "every layer"),
    *("dispatches, token", "prompt", "descriptors, token", "prompt", "pipelines, token", "prompt", "both"),
    *("submissions of a prompt, unknown speed", "400 GB/s"),
)
CARDS = (
    *("model", "cards", "allocations", "largest binding MiB", "weights GiB", "KV GiB of 128k"),
    *("scratch MiB", "host pages MiB"),
)


@dataclass(frozen=True, slots=True)
class Measured:
    host: tuple[object, ...]
    cards: tuple[object, ...]


def columns_of(memory: Sequence[int]) -> tuple[str, ...]:
    return *CARDS, *(f"context in {gib} GiB" for gib in memory)


def pipelines(step: Step) -> set[object]:
    commands = step.executables[0].recording.commands
    return {(c.op, c.variant, c.consts) for c in commands if isinstance(c, Dispatch)}


def counts(step: Step) -> tuple[int, int]:
    dispatches = [c for c in step.executables[0].recording.commands if isinstance(c, Dispatch)]
    return len(dispatches), sum(len(d.bound) + (d.step is not None) for d in dispatches)


def submissions(step: Step, pace: Pace) -> int:
    recording = step.executables[0].recording
    whole = Recording(recording.name, [c for c in recording.commands if not isinstance(c, Cut)])
    cuts = sum(isinstance(c, Cut) for c in cut_long(whole, pace).commands)
    return cuts + len(whole.segments())


def context_in(memory_gib: int, fixed: int, kv: int) -> str:
    """Return the longest context that fits in memory together with `fixed` bytes. N_CTX tokens take `kv`
    bytes."""
    room = memory_gib * (1 << 30) * (1 - RESERVE) - fixed
    n_ctx = min(N_CTX, int(room / kv * N_CTX)) // 1024
    return f"{n_ctx}k" if n_ctx > 0 else "-"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A step, and the median CPU seconds of recording it: with equal layers recorded once, and with every
    layer."""

    step: Step
    once_s: float
    every_s: float


def recorded(runner: Runner, n_rows: int, top_k: int) -> Recorded:
    halves = n_rows > 1 and in_halves(runner.mesh.devices, runner.options)
    kind, steps = StepKind.of_run(n_rows, 1, top_k, halves), runner.mesh.steps
    took: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(TURNS):
        for once in took:
            steps.repeating = once
            steps.by_kind.pop(kind, None)
            began = time.process_time()
            step = steps.of(kind)
            took[once].append(time.process_time() - began)
    steps.repeating = True
    return Recorded(step, statistics.median(took[True]), statistics.median(took[False]))


def step_kib(runner: Runner, kind: StepKind, once: bool) -> float:
    """Return the memory that Python allocates for a step."""
    steps = runner.mesh.steps
    steps.repeating = once
    steps.by_kind.pop(kind, None)
    steps.of(kind)  # fills the tables that steps share
    del steps.by_kind[kind]
    tracemalloc.start()
    steps.of(kind)
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    steps.repeating = True
    return nbytes / 1024


def measure(
    spec: str,
    n: int,
    memory: Sequence[int] = MEMORY_GIB,
    overrides: Sequence[tuple[str, str]] = (),
) -> Measured:
    devices = [SimulatedDevice(i, ROOM_NBYTES) for i in range(n)]
    names = [device.name for device in devices]
    options = Options.of(
        spec,
        devices=names,
        n_ctx=N_CTX,
        n_ubatch=N_PROMPT,
        use_mmap=False,
        tensor_split=[1] * n,
        override_tensor=tuple(overrides),
    )
    began = time.process_time()
    with variable(env.CACHE, "off"):  # The speed of simulated cards cannot be measured.
        runner = Runner(options, Hollow(spec), devices=devices)
        start_s = time.process_time() - began
        of_token = recorded(runner, 1, 1)  # Startup does not record top_k = 1.
        of_prompt = recorded(runner, N_PROMPT, runner.max_top_k)
        token, prompt = of_token.step, of_prompt.step
        python_kib = [step_kib(runner, token.kind, once) for once in (True, False)]
    host_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    first, last = pipelines(token), pipelines(prompt)
    (d_token, b_token), (d_prompt, b_prompt) = counts(token), counts(prompt)
    host: tuple[object, ...] = spec, n, start_s, of_token.once_s, of_token.every_s
    host += (of_prompt.once_s, of_prompt.every_s, host_mib, *python_kib)
    host += (d_token, d_prompt, b_token, b_prompt, len(first), len(last), len(first & last))
    host += (submissions(prompt, Pace()), submissions(prompt, MEASURED))
    most = max(devices, key=lambda device: device.heaps[0])
    held = most.nbytes
    pages = max(device.nbytes[home] for device in devices for home in (Home.HOST, Home.STAGING, Home.PAGES))
    cards: tuple[object, ...] = spec, n, most.allocations, max(d.largest for d in devices) >> 20
    cards += held[Home.WEIGHTS] / 2**30, held[Home.KV] / 2**30, held[Home.SCRATCH] >> 20, pages >> 20
    fixed = held[Home.WEIGHTS] + held[Home.SCRATCH]
    cards += tuple(context_in(gib, fixed, held[Home.KV]) for gib in memory)
    return Measured(host, cards)


def in_a_process(spec: str, n: int, memory: Sequence[int], overrides: Sequence[tuple[str, str]]) -> Measured:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure, spec, n, memory, overrides).result()


def _override(text: str) -> tuple[str, str]:
    pattern, _, target = text.rpartition("=")
    return pattern, target


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help="synthetic models (default: %(default)s)")
    parser.add_argument("--cards", default=",".join(map(str, COUNTS)), help="numbers (default: %(default)s)")
    parser.add_argument("--memory", default="8,16,24", help="GiB of a card (default: %(default)s)")
    parser.add_argument(
        "-ot", "--override-tensor", type=_override, action="append", default=[], metavar="REGEX=TARGET",
        help="tensors elsewhere, for example exps=CPU",
    )  # fmt: skip
    args = parser.parse_args(argv)
    with exit_on_errors():
        memory = [whole_number("--memory", number_of(word), 1, 4096) for word in args.memory.split(",")]
        numbers = [whole_number("--cards", number_of(word), 1, 32) for word in args.cards.split(",")]
        results = []
        for spec in args.models.split(","):
            for n in numbers:
                sys.stderr.write(f"{spec} on {n}\n")
                results.append(in_a_process(spec, n, memory, args.override_tensor))
        table(
            f"The host: contexts of {N_CTX}, prompts of {N_PROMPT}", HOST, [result.host for result in results]
        )
        table("The card that holds most", columns_of(memory), [result.cards for result in results])
    return 0


if __name__ == "__main__":
    sys.exit(main())
