"""Compares the native runtime with Kompute on one device: `python -m vkbackend.tools.studies.bench_runtimes
-m model.gguf`.

Prints the tables of docs/runtimes.md. They contain memory, and times per dispatch (in a chain of tiny
dispatches), per op, per token, and per all-reduce on one to three logical devices. The runtimes alternate.
Needs the package kp, as in .venv-kompute.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

from vkbackend import env
from vkbackend.buffer import Home, View
from vkbackend.checks import whole_number
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.options import Options
from vkbackend.models.placement.memory_report import HOMES
from vkbackend.ops import OPS, Recorder
from vkbackend.recording import Recording, derive_barriers
from vkbackend.runtime import Device, Executable
from vkbackend.step import Run
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.measure.case_times import Chain
from vkbackend.tools.measure.turns import exit_on_errors, least_and_median, table, variable
from vkbackend.tools.op_cases.cases import CASES

# Shapes are small, so on a software driver a dispatch costs more than its arithmetic.
OP_CASES = r"^(MatVec\(type='(f32|q8_0)'|RmsNorm|Rope|Add\(|KvStore|AttnDecode)"
CHAIN = 64
ROUNDS = 4
N_CTX = 128
# The second entry is the native runtime with only the shaders that Kompute can run.
WAYS = {"native": "native", "native, portable shaders": "native", "kompute": "kompute"}


def portable(way: str) -> AbstractContextManager[None]:
    needed = env.FEATURES & {feature for op in OPS.values() for feature in op.needs}
    return variable("VKBACKEND_DISABLE", ",".join(sorted(needed))) if "portable" in way else nullcontext()


@contextmanager
def opened(spec: str, way: str) -> Iterator[Device]:
    with portable(way):
        (device,) = open_devices([spec], WAYS[way])
    try:
        yield device
    finally:
        device.close()


def chain(device: Device, dependent: bool) -> Executable:
    a, b = (View(device.buffer(256 * CHAIN, Home.SCRATCH, name), 0, (CHAIN, 64), "u32") for name in "ab")
    recording = Recording("chain")
    for i in range(CHAIN):
        row = 0 if dependent else i
        src, dst = (b, a) if dependent and i % 2 else (a, b)
        Recorder(recording, device.limits).copy_words(src.rows(row, row + 1), dst.rows(row, row + 1))
    return device.build(derive_barriers(recording))


def children_nbytes() -> int:
    total = 0
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        for child in (task / "children").read_text(encoding="utf-8").split():
            total += int(Path(f"/proc/{child}/statm").read_text(encoding="utf-8").split()[1])
    return total * resource.getpagesize()


@contextmanager
def loaded(path: str, devices: Sequence[str], way: str) -> Iterator[Runner]:
    shares = [1] * len(devices)
    options = Options.of(
        path, devices=devices, tensor_split=shares, n_ctx=N_CTX, n_ubatch=8, runtime=WAYS[way]
    )
    with portable(way):
        runner = Runner(options)
    try:
        yield runner
    finally:
        runner.close()


def dispatches(spec: str, repeats: int) -> None:
    chains: dict[str, tuple[Device, list[Executable]]] = {}
    with ExitStack() as stack:
        for name, order in (("native", ""), ("kompute, word", "word"), ("kompute, submit", "submit")):
            device = stack.enter_context(opened(spec, name.partition(",")[0]))
            with variable(env.KOMPUTE_ORDER, order):
                chains[name] = device, [chain(device, dependent) for dependent in (False, True)]
        us: dict[str, list[list[float]]] = {name: [[], []] for name in chains}
        for _ in range(1 + 5 * repeats):
            for name, (device, pair) in chains.items():
                for executable, took in zip(pair, us[name], strict=True):
                    began = time.perf_counter()
                    device.replay(executable)
                    took.append(1e6 * (time.perf_counter() - began) / CHAIN)
        for _, pair in chains.values():
            for executable in pair:
                executable.close()
    rows = [(name, *(x for took in pair for x in least_and_median(took[1:]))) for name, pair in us.items()]
    table("us per dispatch", ("runtime", "independent", "(median)", "dependent", "(median)"), rows)


def per_op(spec: str, pattern: str, repeats: int) -> None:
    cases = {type(case): case for case in CASES if re.search(pattern, repr(case))}.values()
    rows = []
    with ExitStack() as stack:
        devices = [stack.enter_context(opened(spec, way)) for way in WAYS]
        for case in cases:
            cases_on = [Chain(device, case) for device in devices]
            rounds = [[min(chain_of.seconds(CHAIN, repeats)) for chain_of in cases_on] for _ in range(ROUNDS)]
            us = [1e6 * min(of_device) for of_device in zip(*rounds, strict=True)]
            rows.append((f"`{case!r}`", *us, us[2] / us[1]))
            for chain_of in cases_on:
                chain_of.close()
    table("us per op", ("case", *WAYS, "ratio of the last two"), rows)


def per_token(path: str, spec: str, counts: Sequence[int], n_tokens: int) -> None:
    rows = []
    for n in counts:
        with ExitStack() as stack:
            runners = [stack.enter_context(loaded(path, [spec] * n, way)) for way in WAYS]
            seconds: list[list[float]] = [[] for _ in WAYS]
            reduce_s: list[list[float]] = [[] for _ in WAYS]
            for pos in range(n_tokens + 1):
                for runner, took, of_reduce in zip(runners, seconds, reduce_s, strict=True):
                    (reduces, before), began = runner.reduce_stats(), time.perf_counter()
                    runner.step([1], [Run(0, 0, 1, pos)], [0])
                    took.append(time.perf_counter() - began)
                    after, so_far = runner.reduce_stats()
                    of_reduce.append((so_far - before) / max(after - reduces, 1))
            processes = 0.0, 0.0, children_nbytes() / 2**20
            for r, way in enumerate(WAYS):
                buffers = sum(row[home] for row in runners[r].memory() for home in HOMES) / 2**20
                ms, us = ([1e3 * s for s in seconds[r][1:]], [1e6 * s for s in reduce_s[r][1:]])
                rows.append((n, way, *least_and_median(ms), *least_and_median(us), buffers, processes[r]))
    columns = (
        "devices",
        "runtime",
        "ms per token",
        "(median)",
        "us per reduce",
        "(median)",
        "MiB of buffers",
        "MiB of worker processes",
    )
    table("per token", columns, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-m", "--model", default=demo_model(), help="a .gguf file (default: the demo model)")
    parser.add_argument("-dev", "--device", default="0", help="the device (default: 0)")
    parser.add_argument("-n", type=int, default=32, help="tokens to decode (default: 32)")
    parser.add_argument(
        "-r", "--repeats", type=int, default=10, help="repeats of a measurement (default: 10)"
    )
    parser.add_argument(
        "--case", default=OP_CASES, metavar="REGEX", help="op cases; the last of each op is timed"
    )
    args = parser.parse_args()
    with exit_on_errors():
        measure(args)
    return 0


def measure(args: argparse.Namespace) -> None:
    whole_number("-n", args.n, 1, N_CTX - 1)
    whole_number("--repeats", args.repeats, 1, 1000)
    dispatches(args.device, args.repeats)
    per_op(args.device, args.case, args.repeats)
    per_token(args.model, args.device, (1, 2, 3), args.n)


if __name__ == "__main__":
    sys.exit(main())
