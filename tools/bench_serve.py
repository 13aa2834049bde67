"""`vkbackend bench-serve`: measure a server that provides OpenAI's API.

For each number of streaming clients, the columns are total tokens per second, milliseconds to the first token
and between events (median, 99th percentile), and failed answers. The exit code is 1 if an answer failed.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import os
import sys
from typing import Any

from vkbackend.checks import whole_number
from vkbackend.tools.console import console, printable, write_json
from vkbackend.tools.measure.http_load import Endpoint, HttpLoad, measure, model_of

COLUMNS = "clients", "texts", "errors", "t/s", "first ms p50", "first ms p99", "next ms p50", "next ms p99"
MAX_CLIENTS, MAX_TEXTS, MAX_GEN = 1024, 100_000, 100_000
KEY_VARIABLE = "OPENAI_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--url", required=True, metavar="URL", help="the API, for example http://127.0.0.1:8080/v1")
    add("--model", metavar="NAME", help="the model to ask for (default: the first that the server lists)")
    add("--api", choices=("chat", "completions"), default="completions",
        help="which endpoint is asked (default: %(default)s)")  # fmt: skip
    add("--api-key", metavar="KEY", help=f"the key to send (default: ${KEY_VARIABLE}, if it is set)")
    add("-np", "--parallel", type=counts, default=[1, 4, 16], metavar="N,N",
        help="numbers of clients at once (default: 1,4,16)")  # fmt: skip
    add("-r", "--repetitions", type=int, default=2, metavar="N",
        help="texts of each client (default: %(default)s)")  # fmt: skip
    add("-n", "--n-gen", type=int, default=64, metavar="N", help="tokens of a text (default: %(default)s)")
    add("-o", "--output", choices=("md", "csv", "json", "jsonl"), default="md",
        help="the format (default: %(default)s)")  # fmt: skip


def counts(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers, for example 1,4,16") from None


def run(args: argparse.Namespace) -> int:
    endpoint = Endpoint.of(args.url, args.api_key or os.environ.get(KEY_VARIABLE))
    for n in args.parallel:
        whole_number("parallel", n, 1, MAX_CLIENTS)
    whole_number("repetitions", args.repetitions, 1, MAX_TEXTS)
    whole_number("n_gen", args.n_gen, 1, MAX_GEN)
    return asyncio.run(_run(args, endpoint))


async def _run(args: argparse.Namespace, endpoint: Endpoint) -> int:
    err = console(stderr=True)
    model = args.model or await model_of(endpoint)
    err.print(f"model {printable(model)} at {args.url}", markup=False)
    await measure(endpoint, args.api, model, 1, 1, 2)  # records all steps
    loads = []
    for i, n in enumerate(args.parallel):
        err.print(f"{n} clients", markup=False)
        load = await measure(endpoint, args.api, model, n, args.repetitions, args.n_gen)
        loads.append(load)
        for error in load.errors:
            err.print(f"  failed: {printable(error)}", markup=False)
        _write(load, args.output, first=i == 0)
    if args.output == "json":
        write_json([load.record() for load in loads], indent=1)
    return int(any(load.n_errors for load in loads))


def _write(load: HttpLoad, output: str, *, first: bool) -> None:
    record = load.record()
    if output == "csv":
        write = csv.writer(sys.stdout).writerow
        if first:
            write(record)
        write(record.values())
    elif output == "jsonl":
        write_json(record)
    elif output == "md":
        if first:
            _line(COLUMNS)
            _line(["---:"] * len(COLUMNS))
        _line(
            [load.n, load.n_texts, load.n_errors, f"{load.tokens_per_s:.1f}", f"{load.ttft_p50:.1f}",
             f"{load.ttft_p99:.1f}", f"{load.itl_p50:.2f}", f"{load.itl_p99:.2f}"]
        )  # fmt: skip
    sys.stdout.flush()


def _line(values: Any) -> None:
    sys.stdout.write(f"| {' | '.join(map(str, values))} |\n")


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["bench-serve", *sys.argv[1:]]))
