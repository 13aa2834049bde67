"""Times the compilation of a model's pipelines: `python -m vkbackend.tools.studies.bench_compile -m
model.gguf -dev 0`.

Prints the minimum seconds to compile a decode step and a prompt with one thread, several threads, and a
filled pipeline cache. The driver's own cache must be disabled (in Mesa with MESA_SHADER_CACHE_DISABLE=true).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vkbackend import env
from vkbackend.checks import whole_number
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.options import Options
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.measure.compile_times import compile_times
from vkbackend.tools.measure.turns import exit_on_errors, least_and_median, table


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
    with exit_on_errors():
        repeats = whole_number("--repeats", args.repeats, 1, 1000)
        n_rows = whole_number("--n-prompt", args.n_prompt, 1, 512)
        most = whole_number("--threads", args.threads or env.compile_threads(), 1, 64)
        measure(args.model, args.device, n_rows, sorted({1, most}), repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
