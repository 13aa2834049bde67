"""Compares vkbackend's server with llama-server: `python -m vkbackend.tools.studies.serving_beside -dev 0
--python FILE`.

FILE is a Python interpreter with the package xllamacpp, whose llama-server runs on the CPU. Measures each
server by calls in its process and over HTTP, with 1 and 16 clients, in turn. Prints tokens per second, their
ratio, and the growth from 1 to 16 clients. The last run has 64 clients of vkbackend's server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vkbackend.models.llm import LLM
from vkbackend.tools.measure import llama_server_worker
from vkbackend.tools.measure.http_load import Endpoint, model_of
from vkbackend.tools.studies.serving import N_CTX, body, clients, command, direct

SLOTS, MANY = 16, 64
Rate = Callable[[int, int], float]  # (clients, seed) -> tokens per second


def over_http(endpoint: Endpoint, n: int, n_tokens: int, seed: int) -> float:
    began = time.perf_counter()
    texts = asyncio.run(clients(endpoint, n, n_tokens, seed))
    rate = sum(text.n_tokens for text in texts) / (time.perf_counter() - began)
    if wrong := [text.error for text in texts if text.error]:
        raise SystemExit(f"{len(wrong)} of {n} texts failed, the first with: {wrong[0]}")
    return rate


@contextmanager
def llama_server(python: str, model: str, n_tokens: int) -> Iterator[tuple[Rate, Endpoint]]:
    process = subprocess.Popen(
        [python, str(llama_server_worker.__file__), model, str(SLOTS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
    )
    assert process.stdin and process.stdout
    pipe, answers = process.stdin, process.stdout

    def rate(n: int, seed: int) -> float:
        pipe.write(json.dumps([body(seed + i, n_tokens) | {"stream": False} for i in range(n)]) + "\n")
        pipe.flush()
        return n * n_tokens / float(answers.readline())

    try:
        if not (address := answers.readline().strip()):
            raise SystemExit(f"llama-server did not start: does {python} have xllamacpp?")
        yield rate, Endpoint.of(f"{address.removesuffix('/v1')}/v1")
    finally:
        process.terminate()
        process.wait(60)


def compare(name: str, rate: Rate, endpoint: Endpoint, n_tokens: int, rounds: int) -> None:
    asyncio.run(model_of(endpoint))
    alone = 0.0
    for n in (1, SLOTS):
        pairs = []
        for turn in range(-1, rounds):
            pair = rate(n, 1000 * turn + 5000), over_http(endpoint, n, n_tokens, 1000 * turn + 9000)
            pairs += [pair] if turn >= 0 else []
        inside, http = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        alone = alone or http
        print(
            f"{name:13} {n:2} clients: directly {inside:7.1f} tokens/s, over HTTP {http:7.1f}, "
            f"ratio {ratio:.2f}, {http / alone:.2f} x one client",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-m", "--model")
    add("-dev", "--device", default="0")
    add("-n", type=int, default=64, help="tokens of a text")
    add("-r", type=int, default=3, help="rounds")
    add("--python", default=sys.executable, help="a Python that has xllamacpp")
    args = parser.parse_args()
    from vkbackend.tools.flags.text import demo_model

    model, n_tokens = args.model or demo_model(), args.n
    with llama_server(args.python, model, n_tokens) as (rate, endpoint):
        compare("llama-server", rate, endpoint, n_tokens, args.r)
    flags = ["-m", model, "-dev", args.device, "-np", str(SLOTS), "-c", str(N_CTX)]
    flags += ["--kv-cells", str(SLOTS * N_CTX), "--port", "0", "--log-disable"]
    options = {"devices": args.device, "n_slots": SLOTS, "n_ctx": N_CTX, "process": True}
    with LLM(model, **options) as llm, command("vkbackend", "serve", *flags) as (_, endpoint):

        def batch(n: int, seed: int) -> float:
            began = time.perf_counter()
            return asyncio.run(direct(llm, n, n_tokens, seed)) / (time.perf_counter() - began)

        compare("vkbackend", batch, endpoint, n_tokens, args.r)
        print(f"{MANY} clients: 0 errors, {over_http(endpoint, MANY, n_tokens, 77):.1f} tokens/s")


if __name__ == "__main__":
    main()
