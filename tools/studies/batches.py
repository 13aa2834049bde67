"""Measures decode steps of 1 to many sequences: `python -m vkbackend.tools.studies.batches -m model.gguf`.

Prints the median milliseconds of a step of n sequences, without scheduling and sampling. Compares the time
per token with the shortest time per token of any smaller n, and with the time per token of a prompt of 64
tokens. Batch sizes alternate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from vkbackend.checks import whole_number
from vkbackend.meta.step_kind import Wanted
from vkbackend.models.arguments import device_list
from vkbackend.models.engine.runner.micro_batch import MicroBatch
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.options import Options
from vkbackend.step import Run
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.measure.turns import exit_on_errors, table

SIZES = 1, 2, 4, 8, 12, 16, 32, 64
PROMPT = 64


def decode(runner: Runner, n: int, depth: int) -> float:
    runs = [Run(slot, slot, 1, depth) for slot in range(n)]
    return _timed(runner, [1 + i % 99 for i in range(n)], runs, list(range(n)))


def prefill(runner: Runner) -> float:
    return _timed(runner, [1 + i % 99 for i in range(PROMPT)], [Run(0, 0, PROMPT, 0)], [PROMPT - 1])


def _timed(runner: Runner, tokens: list[int], runs: list[Run], outputs: list[int]) -> float:
    began = time.perf_counter()
    runner.collect(runner.launch(MicroBatch(tokens, runs, outputs), Wanted(runner.max_top_k)))
    return time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default=demo_model(), help="GGUF file (default: the demo model)")
    parser.add_argument("-dev", "--device", default="0", help="devices (default: 0)")
    parser.add_argument("-d", "--depth", type=int, default=64, help="positions before each row (default: 64)")
    parser.add_argument("-r", "--rounds", type=int, default=40, help="rounds of turns (default: 40)")
    args = parser.parse_args(argv)
    with exit_on_errors():
        depth = whole_number("-d", args.depth, 0, 4096)
        n_ctx = max(depth + 1, PROMPT)
        devices = device_list("devices", args.device)
        runner = Runner(
            Options(args.model, devices=devices, n_ctx=n_ctx, n_slots=max(SIZES), n_ubatch=PROMPT)
        )
        try:
            for slot in range(max(SIZES)):
                for at in range(0, depth, PROMPT):
                    n = min(PROMPT, depth - at)
                    runner.step([1] * n, [Run(slot, 0, n, at)], [])
            took: dict[int, list[float]] = {n: [] for n in SIZES}
            prompts: list[float] = []
            for i in range(args.rounds + 2):
                for n in SIZES:
                    took[n].append(decode(runner, n, depth))
                prompts.append(prefill(runner))
                if i == 1:  # Rounds 1 and 2 compile and warm up.
                    took, prompts = {n: [] for n in SIZES}, []
        finally:
            runner.close()
    prompt = statistics.median(prompts) / PROMPT
    rows: list[tuple[object, ...]] = []
    best = float("inf")
    for n in SIZES:
        each = statistics.median(took[n]) / n
        rows.append((n, 1e3 * each * n, 1e3 * each, 1 / each, each / best if rows else "-", prompt / each))
        best = min(best, each)
    rows.append((f"prompt of {PROMPT}", 1e3 * prompt * PROMPT, 1e3 * prompt, 1 / prompt, "-", 1.0))
    columns = "sequences", "ms a step", "ms a token", "tokens/s", "of the best before", "rate of the prompt's"
    table(f"{args.model}, devices {args.device}, depth {depth}", columns, rows)


if __name__ == "__main__":
    main()
