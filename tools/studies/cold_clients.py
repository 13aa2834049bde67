"""Times the first requests of a new server: `python -m vkbackend.tools.studies.cold_clients [-m MODEL]`.

Starts a server for each way to record steps, in turns: every layer of every step, equal layers once, and
also steps ahead while the server is idle. Then `-np` clients ask at once. The columns are the milliseconds
to the first token and between tokens, the seconds until all texts are complete, the failed answers, and the
machine's load. `--layers N` replaces the model by N small random layers with the model's vocabulary.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from vkbackend import env
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.measure.http_load import HttpLoad, measure, model_of
from vkbackend.tools.measure.turns import table, variable
from vkbackend.tools.studies.serving import N_CTX, command
from vkbackend.tools.studies.serving_start import tiny

# (name, VKBACKEND_REPEAT, VKBACKEND_AHEAD)
WAYS = ("every layer", "0", "0"), ("equal layers once", "1", "0"), ("also ahead", "1", "1")
COLUMNS = "steps", "round", "first ms p50", "first ms p99", "next ms p99", "all texts s", "errors", "load"


def cold(flags: Sequence[str], n: int, n_gen: int, idle_s: float) -> tuple[HttpLoad, float]:
    with command("vkbackend", "serve", *flags, "--port", "0") as (_, endpoint):
        time.sleep(idle_s)
        model = asyncio.run(model_of(endpoint))
        began = time.perf_counter()
        load = asyncio.run(measure(endpoint, "completions", model, n, 1, n_gen))
        return load, time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vkbackend.tools.studies.cold_clients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-m", "--model", default=demo_model(), help="the model (default: the demo's)")
    add("--layers", type=int, default=0, help="in its place: this many small layers with its vocabulary")
    add("-dev", "--device", default="0", help="device list (default: %(default)s)")
    add("-np", "--parallel", type=int, default=16, help="clients (default: %(default)s)")
    add("-n", "--n-gen", type=int, default=16, help="tokens of a text (default: %(default)s)")
    add("-r", "--repetitions", type=int, default=2, help="rounds (default: %(default)s)")
    add("--idle", type=float, default=30.0, help="seconds before the requests (default: %(default)s)")
    args = parser.parse_args()
    rows: list[tuple[object, ...]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = args.model
        if args.layers:
            tiny(args.model, Path(path := str(Path(folder) / "layers.gguf")), args.layers)
        n_cells = str(N_CTX * args.parallel)
        flags = ["-m", path, "-dev", args.device, "-np", str(args.parallel), "-c", str(N_CTX)]
        flags += ["--kv-cells", n_cells]
        for turn in range(args.repetitions):
            for name, repeats, ahead in WAYS:
                sys.stderr.write(f"{name}, round {turn}\n")
                with variable(env.REPEAT, repeats), variable(env.AHEAD, ahead):
                    load, took_s = cold(flags, args.parallel, args.n_gen, args.idle)
                times = load.ttft_p50, load.ttft_p99, load.itl_p99, took_s
                rows.append((name, turn, *times, load.n_errors, os.getloadavg()[0]))
    table(f"{args.parallel} clients of a new server, {args.idle:g} s after its start", COLUMNS, rows)


if __name__ == "__main__":
    main()
