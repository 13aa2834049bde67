"""What compiling a model's pipelines takes:
`python -m vkbackend.tools.studies.bench_compile -m model.gguf -dev 0`.

Prints a Markdown table: seconds for those of a decode step and a prompt together, one thread and several in
turn, and with the pipeline cache that a first run left. The least of each counts: other work can only add to
it. Drivers may have a cache of their own, which hides all (Mesa: MESA_SHADER_CACHE_DISABLE=true).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from vkbackend import env
from vkbackend.checks import whole_number
from vkbackend.errors import UnsupportedFeature
from vkbackend.meta.step_kind import StepKind
from vkbackend.models.engine.runner import Runner
from vkbackend.models.options import Options
from vkbackend.recording import Dispatch
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.measure.turns import errors_told, least_and_median, table, variable

CACHED = "one, from the cache file"


def dispatches_of(runner: Runner, n_rows: int) -> list[Dispatch]:
    """What the first device runs for a token and for a prompt."""
    steps = [
        runner.mesh.recorded_step(StepKind.of_run(1, 1)),
        runner.mesh.recorded_step(StepKind.of_run(n_rows, 1)),
    ]
    commands = (c for step in steps for c in step.executables[0].recording.accesses())
    return [c for c in commands if isinstance(c, Dispatch)]


def compile_times(
    runner: Runner, n_rows: int, threads: Sequence[int], repeats: int
) -> tuple[int, dict[str, list[float]]]:
    """Pipelines of the first device; seconds for all, by number of threads and from the cache file."""
    from vkbackend.vulkan.device import VulkanDevice
    from vkbackend.vulkan.program import Programs

    device, dispatches = runner.mesh.devices[0], dispatches_of(runner, n_rows)
    if not isinstance(device, VulkanDevice):
        raise UnsupportedFeature(f"{device.name} compiles no pipelines; name a device of Vulkan")

    def seconds(n_threads: int, folder: str) -> float:
        with variable("VKBACKEND_CACHE", folder), variable(env.COMPILE_THREADS, str(n_threads)):
            programs = Programs(device, device.memory, device.transfers)
            try:
                began = time.perf_counter()
                programs.pipelines(dispatches)
                return time.perf_counter() - began
            finally:
                programs.close()

    took: dict[str, list[float]] = {}
    for _ in range(repeats):
        for n in threads:
            with tempfile.TemporaryDirectory() as folder:
                took.setdefault(str(n), []).append(seconds(n, folder))
        with tempfile.TemporaryDirectory() as folder:
            seconds(max(threads), folder)
            took.setdefault(CACHED, []).append(seconds(1, folder))
    return len({(d.op, d.variant, d.consts) for d in dispatches}), took


def measure(path: str, spec: str, n_rows: int, threads: Sequence[int], repeats: int) -> None:
    runner = Runner(Options.of(path, devices=[spec], n_ctx=2 * n_rows, n_ubatch=n_rows))
    try:
        n, took = compile_times(runner, n_rows, threads, repeats)
        first = min(took[str(threads[0])])
        rows = [[way, *least_and_median(times), first / min(times)] for way, times in took.items()]
        table(
            f"{n} pipelines of {Path(path).name} on {runner.device_names()[0]}, s",
            ("threads", "least", "(median)", "ratio"),
            rows,
        )
    finally:
        runner.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-m", "--model", default=demo_model(), help="a .gguf file (default: the demo model)")
    parser.add_argument("-dev", "--device", default="0", metavar="NAME", help="the device (default: 0)")
    parser.add_argument("-p", "--n-prompt", type=int, default=16, help="rows of the prompt (default: 16)")
    parser.add_argument("-t", "--threads", type=int, help="(default: as many as loading takes)")
    parser.add_argument("-r", "--repeats", type=int, default=5, help="(default: 5)")
    args = parser.parse_args()
    with errors_told():
        repeats = whole_number("--repeats", args.repeats, 1, 1000)
        n_rows = whole_number("--n-prompt", args.n_prompt, 1, 512)
        most = whole_number("--threads", args.threads or env.compile_threads(), 1, 64)
        measure(args.model, args.device, n_rows, sorted({1, most}), repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
