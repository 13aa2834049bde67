"""Measures the time that fusing saves: `python -m vkbackend.tools.studies.bench_fusing -m model.gguf -dev 0`.

Prints the cost of a tiny dispatch, the dispatches and barriers of a decode step, and the minimum milliseconds
per step with and without fusing. The cost of a dispatch is computed from chains of two lengths, so it
excludes the cost of a submission.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from vkbackend import env
from vkbackend.buffer import Home, View
from vkbackend.checks import whole_number
from vkbackend.meta.step_kind import StepKind
from vkbackend.models.arguments import device_list
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.options import Options
from vkbackend.ops import Recorder
from vkbackend.recording import Barrier, Copy, Dispatch, Recording, derive_barriers
from vkbackend.runtime import Device
from vkbackend.step import Run
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.measure.turns import exit_on_errors, least_and_median, table, variable

LENGTHS = 100, 1000
PROMPT = 16
WAYS = {"fused": "1", "one by one": "0"}


def per_dispatch(device: Device, dependent: bool, repeats: int) -> float:
    """Return microseconds per dispatch of 32 elements. If `dependent`, each dispatch reads the previous
    result."""
    buffer = device.buffer(512 * (LENGTHS[1] + 1), Home.SCRATCH, "chain")
    least = []
    for length in LENGTHS:
        recording, step = Recording("chain"), 256 if dependent else 512
        for i in range(length):
            source, target = View(buffer, step * i, (32,)), View(buffer, step * i + 256, (32,))
            Recorder(recording, device.limits).scale(source, target, c=1.0)
        executable = device.build(derive_barriers(recording))
        took = []
        for _ in range(1 + repeats):
            began = time.perf_counter()
            device.replay(executable)
            took.append(time.perf_counter() - began)
        executable.close()
        least.append(min(took))
    device.free(buffer)
    return 1e6 * (least[1] - least[0]) / (LENGTHS[1] - LENGTHS[0])


def counts(recording: Recording) -> tuple[int, int, int]:
    kinds = Dispatch, Barrier, Copy
    return tuple(sum(isinstance(c, kind) for c in recording.commands) for kind in kinds)  # type: ignore[return-value]


def layer(recording: Recording, il: int) -> Recording:
    at = [i for i, c in enumerate(recording.commands) if getattr(c, "label", "").startswith(f"blk.{il}.")]
    return Recording(f"layer {il}", recording.commands[at[0] - 1 : at[-1] + 1])


def per_step(path: str, devices: Sequence[str], repeats: int) -> None:
    options = Options.of(path, devices=devices, tensor_split=[1] * len(devices), n_ctx=128, n_ubatch=PROMPT)
    with ExitStack() as stack:
        runners = {}
        for name, value in WAYS.items():
            with variable(env.FUSE, value):  # env.FUSE applies to recording.
                runner = Runner(options)
                stack.callback(runner.close)
                (
                    runner.mesh.recorded_step(StepKind.of_run(1, 1)),
                    runner.mesh.recorded_step(StepKind.of_run(PROMPT, 1)),
                )
            runners[name] = runner
        rows: list[list[object]] = []
        for name, runner in runners.items():
            recording = runner.mesh.recorded_step(StepKind.of_run(1, 1)).executables[0].recording
            commands = layer(recording, min(1, runner.model.n_layer - 1))
            pipelines = {(c.op, c.variant, c.consts) for c in recording.accesses() if isinstance(c, Dispatch)}
            rows.append([name, *counts(recording), len(pipelines), *counts(commands)])
        columns = "step", "dispatches", "barriers", "copies", "pipelines", "in a layer", "barriers", "copies"
        table(f"a decode step on the first of {len(devices)} devices", columns, rows)
        took: dict[tuple[str, int], list[float]] = {(name, n): [] for name in WAYS for n in (1, PROMPT)}
        for _ in range(1 + repeats):
            for (name, n), times in took.items():
                began = time.perf_counter()
                runners[name].step([1] * n, [Run(0, 0, n, 0)], [n - 1])
                times.append(1e3 * (time.perf_counter() - began))
        rows = [[name, n, *least_and_median(times[1:])] for (name, n), times in took.items()]
        table("ms per step", ("way", "rows", "least", "(median)"), rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-m", "--model", default=demo_model(), help="a .gguf file (default: the demo model)")
    parser.add_argument("-dev", "--device", default="0", metavar="LIST", help="devices (default: 0)")
    parser.add_argument("-r", "--repeats", type=int, default=30, help="(default: 30)")
    args = parser.parse_args()
    with exit_on_errors():
        repeats = whole_number("--repeats", args.repeats, 1, 10_000)
        specs = device_list("devices", args.device) or ()
        [device] = open_devices(specs[:1])
        try:
            us = [per_dispatch(device, dependent, repeats) for dependent in (False, True)]
        finally:
            device.close()
        table("us per dispatch", ("independent", "dependent"), [us])
        per_step(args.model, specs, repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
