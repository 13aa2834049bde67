"""Compares steps of several sizes in one run: `python -m vkbackend.tools.studies.step_rows -m model.gguf`.

Opens the model once for each -ub, and computes prompts and then single tokens. Runs of the models alternate.
Prints the prompts' tokens per second and per CPU second, the scratch memory, and the time to the first token
of the last prompt. Also prints the time of a decoded token relative to the first -ub. CPU time includes
software drivers' threads, and depends less on other programs than wall time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from vkbackend.buffer import Home
from vkbackend.checks import number_of, whole_number
from vkbackend.models.arguments import device_list
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.options import Options
from vkbackend.step import MAX_ROWS, MAX_RUNS, Run
from vkbackend.tools.flags.sweeps import values_of
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.measure.synthetic import SHAPES, Synthetic
from vkbackend.tools.measure.turns import exit_on_errors, table

ROWS = "512,1024,2048,4096"
COLUMNS = (
    *("-ub", "scratch MiB", "KiB a row", "prompt t/s", "t/s of the CPU", "ms to the first token"),
    *("ms a token", "CPU ms a token", "of the first -ub"),
)


@dataclass(slots=True)
class Taken:
    """(seconds, CPU seconds) of each repetition, for the prompts and for a decoded token."""

    runner: Runner
    prompt: list[tuple[float, float]] = field(default_factory=list)
    token: list[tuple[float, float]] = field(default_factory=list)

    def run(self, n_prompt: int, n_prompts: int, n_gen: int) -> None:
        """Compute `n_prompts` prompts of `n_prompt` tokens together, then tokens of the first."""
        tokens = np.random.default_rng(0).integers(0, self.runner.n_vocab, n_prompt * n_prompts).tolist()
        self.prompt.append(_timed(lambda: compute(self.runner, tokens, n_prompts)))
        seconds, cpu = _timed(lambda: self._decode(n_prompt, n_gen))
        self.token.append((seconds / n_gen, cpu / n_gen))

    def _decode(self, position: int, n_gen: int) -> None:
        for at in range(position, position + n_gen):
            self.runner.step([1], [Run(0, 0, 1, at)], [0])


def compute(runner: Runner, tokens: Sequence[int], n_prompts: int) -> None:
    length = len(tokens) // n_prompts
    for begin in range(0, len(tokens), runner.n_ubatch):
        end = min(begin + runner.n_ubatch, len(tokens))
        runs, at = [], begin
        while at < end:
            slot, position = divmod(at, length)
            n = min(length - position, end - at)
            runs.append(Run(slot, at - begin, n, position))
            at += n
        last = [run.first_row + run.n_rows - 1 for run in runs if run.first_pos + run.n_rows == length]
        runner.step(tokens[begin:end], runs, last)


def _timed(run: Callable[[], None]) -> tuple[float, float]:
    began, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - began, time.process_time() - cpu


def _medians(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    seconds, cpu = zip(*pairs, strict=True)
    return statistics.median(seconds), statistics.median(cpu)


def rows_of(taken: Sequence[Taken], n_tokens: int) -> list[tuple[object, ...]]:
    """Return the rows of the table, for `n_tokens` of prompts. The last column compares CPU times."""
    first = _medians(taken[0].token)[1]
    rows: list[tuple[object, ...]] = []
    for size in taken:
        (prompt_s, prompt_cpu), (token_s, token_cpu) = _medians(size.prompt), _medians(size.token)
        scratch = sum(device.nbytes[Home.SCRATCH] for device in size.runner.mesh.devices)
        rows.append(
            (
                *(size.runner.n_ubatch, scratch / 2**20, scratch / 2**10 / size.runner.n_ubatch),
                *(f"{n_tokens / prompt_s:.0f}", f"{n_tokens / prompt_cpu:.0f}", 1e3 * prompt_s),
                *(1e3 * token_s, 1e3 * token_cpu, token_cpu / first),
            )
        )
    return rows


def measure(
    options: Sequence[Options], source: str, n_prompt: int, n_prompts: int, n_gen: int, repeats: int
) -> list[Taken]:
    taken: list[Taken] = []
    with ExitStack() as stack:
        for wanted in options:
            sys.stderr.write(f"loading with -ub {wanted.n_ubatch}\n")
            runner = Runner(wanted, Synthetic(source) if _is_synthetic(source) else None)
            stack.callback(runner.close)
            taken.append(Taken(runner))
            Taken(runner).run(n_prompt, n_prompts, 1)  # records the steps
        for i in range(repeats):
            sys.stderr.write(f"run {i + 1} of {repeats}\n")
            for size in taken if i % 2 == 0 else reversed(taken):
                size.run(n_prompt, n_prompts, n_gen)
        title = f"{source}: {n_prompts} prompts of {n_prompt} tokens, then {n_gen} tokens"
        load = f"medians of {repeats} runs in turn, load {os.getloadavg()[0]:.1f}"
        table(f"{title}; {load}", COLUMNS, rows_of(taken, n_prompt * n_prompts))
    return taken


def _is_synthetic(source: str) -> bool:
    return source.partition(":")[0].lower() in SHAPES


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-m", "--model", default=demo_model(),
                        help="a .gguf file or SHAPE:TYPE (default: the demo model)")  # fmt: skip
    parser.add_argument("-dev", "--device", default="0", metavar="LIST", help="devices (default: 0)")
    parser.add_argument("-ub", "--ubatch-size", default=ROWS, metavar="LIST", help="(default: %(default)s)")
    parser.add_argument("-p", "--n-prompt", type=int, default=4096, metavar="N", help="(default: 4096)")
    parser.add_argument("-np", "--parallel", type=int, default=1, metavar="N",
                        help="prompts in one step (default: 1)")  # fmt: skip
    parser.add_argument("-n", "--n-gen", type=int, default=32, metavar="N", help="(default: 32)")
    parser.add_argument("-r", "--repeats", type=int, default=5, metavar="N", help="(default: 5)")
    args = parser.parse_args(argv)
    with exit_on_errors():
        n_prompt = whole_number("-p", args.n_prompt, 1, 1 << 17)
        n_prompts = whole_number("-np", args.parallel, 1, MAX_RUNS)
        n_gen = whole_number("-n", args.n_gen, 1, 1 << 17)
        repeats = whole_number("-r", args.repeats, 1, 1000)
        sizes = [
            whole_number("-ub", number_of(word), 1, MAX_ROWS) for word in values_of("-ub", args.ubatch_size)
        ]
        devices = device_list("devices", args.device) or ()
        n_ctx = n_prompt + n_gen
        options = [
            Options.of(args.model, devices=devices, n_ctx=n_ctx, n_slots=n_prompts, n_ubatch=n) for n in sizes
        ]
        measure(options, args.model, n_prompt, n_prompts, n_gen, repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
