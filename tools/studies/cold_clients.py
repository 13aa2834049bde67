"""Times the first requests of a new server: `python -m vkbackend.tools.studies.cold_clients [-m MODEL]`.

Starts three kinds of servers in turns. The first records every layer of every step, and the others record
equal layers once. The third also records later steps while it is idle. Then `-np` clients send requests at
once, or within `--spread` seconds. Later, they send requests with other words. The columns are the
milliseconds to the first token and between tokens, the kinds of steps that were recorded while the clients
waited, and the seconds of recording. The last columns are the failed answers and the machine's load.
`--layers N` replaces the model by N small random layers with the model's vocabulary.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from vkbackend import env
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.measure.http_load import (
    WORDS,
    Endpoint,
    HttpLoad,
    Text,
    body_of,
    load_of,
    model_of,
    text_of,
)
from vkbackend.tools.measure.turns import table, variable
from vkbackend.tools.studies.serving import N_CTX, command
from vkbackend.tools.studies.serving_beside import llama_server
from vkbackend.tools.studies.serving_start import tiny

# (name, VKBACKEND_REPEAT, VKBACKEND_AHEAD)
WAYS = ("every layer", "0", "0"), ("equal layers once", "1", "0"), ("also ahead", "1", "1")
WAVE = "first ms p50", "first ms p99", "next ms p99", "recorded", "record s"
COLUMNS = "steps", "round", *WAVE, f"again: {WAVE[0]}", *WAVE[1:], "errors", "load"


async def wave(endpoint: Endpoint, n: int, n_words: int, n_gen: int, spread_s: float, seed: int) -> HttpLoad:
    """Client `i` asks at a random moment of the first `spread_s` seconds."""
    model = await model_of(endpoint)
    began = time.perf_counter()

    async def client(i: int) -> Text:
        rng = random.Random(seed + i)
        words = rng.choices(WORDS, k=n_words)
        await asyncio.sleep(spread_s * rng.random())
        return await text_of(endpoint, *body_of("completions", model, words, n_gen, i))

    texts = await asyncio.gather(*map(client, range(n)))
    return load_of(n, texts, time.perf_counter() - began)


async def recorded(endpoint: Endpoint) -> tuple[int, float]:
    """Return how many kinds of steps the engine has recorded, and the seconds that this took. llama-server
    records none."""
    status, _, lines = await endpoint.ask("GET", "/stats")
    text = b"".join([line async for line in lines])
    engine = json.loads(text)["engine"] if status == 200 else {}
    return engine.get("n_recorded", 0), engine.get("record_ms", 0.0) / 1e3


def waves(endpoint: Endpoint, name: str, turn: int, args: argparse.Namespace) -> tuple[object, ...]:
    time.sleep(args.idle)
    sizes = args.parallel, args.words, args.n_gen, args.spread
    cells: list[object] = []
    n_errors, before = 0, asyncio.run(recorded(endpoint))
    for seed in (0, args.parallel):
        load = asyncio.run(wave(endpoint, *sizes, seed))
        now = asyncio.run(recorded(endpoint))
        cells += [load.ttft_p50, load.ttft_p99, load.itl_p99, now[0] - before[0], now[1] - before[1]]
        n_errors, before = n_errors + load.n_errors, now
    return name, turn, *cells, n_errors, os.getloadavg()[0]


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
    add("--spread", type=float, default=0, help="seconds in which the clients arrive (default: all at once)")
    add("--words", type=int, default=8, help="words of a prompt (default: %(default)s)")
    add("-n", "--n-gen", type=int, default=16, help="tokens of a text (default: %(default)s)")
    add("-r", "--repetitions", type=int, default=2, help="rounds (default: %(default)s)")
    add("--python", help="a Python that has xllamacpp: llama-server on the processor is measured as well")
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
                with (
                    variable(env.REPEAT, repeats),
                    variable(env.AHEAD, ahead),
                    command("vkbackend", "serve", *flags, "--port", "0") as (_, endpoint),
                ):
                    rows.append(waves(endpoint, name, turn, args))
            if args.python:
                with llama_server(args.python, path, args.n_gen) as (_, endpoint):
                    rows.append(waves(endpoint, "llama-server", turn, args))
    table(f"{args.parallel} clients of a new server, {args.idle:g} s after its start", COLUMNS, rows)


if __name__ == "__main__":
    main()
