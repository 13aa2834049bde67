"""Compares steps of several sizes in one run: `python -m vkbackend.tools.studies.step_rows -m model.gguf`.

Opens the model once for each -ub, and computes a prompt and then single tokens, alternating between them.
Prints the prompt's tokens per second and per CPU second, the scratch memory, the time to the first token, and
the time of a decoded token relative to the first -ub. CPU time includes software drivers' threads, and
depends less on other programs than wall time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from vkbackend.buffer import Home
from vkbackend.checks import number_of, whole_number
from vkbackend.models.arguments import device_list
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.options import Options
from vkbackend.step import MAX_ROWS
from vkbackend.tools.flags.sweeps import values_of
from vkbackend.tools.flags.text import demo_model
from vkbackend.tools.measure.synthetic import SHAPES, Synthetic
from vkbackend.tools.measure.timing import Timer
from vkbackend.tools.measure.turns import exit_on_errors, table

ROWS = "512,1024,2048,4096"
COLUMNS = (
    *("-ub", "scratch MiB", "KiB a row", "prompt t/s", "t/s of the CPU", "ms to the first token"),
    *("ms a token", "CPU ms a token", "of the first -ub"),
)


@dataclass(slots=True)
class Taken:
    """(seconds, CPU seconds) of each repetition, for the prompt and for a decoded token."""

    runner: Runner
    timer: Timer
    prompt: list[tuple[float, float]] = field(default_factory=list)
    token: list[tuple[float, float]] = field(default_factory=list)

    def run(self, n_prompt: int, n_gen: int) -> None:
        self.prompt.append(_timed(self.timer, 0, n_prompt, 0))
        seconds, cpu = _timed(self.timer, n_prompt, 0, n_gen)
        self.token.append((seconds / n_gen, cpu / n_gen))


def _timed(timer: Timer, depth: int, n_prompt: int, n_gen: int) -> tuple[float, float]:
    began = time.process_time()
    seconds = timer.after(depth, n_prompt, n_gen)
    return seconds, time.process_time() - began


def _medians(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    seconds, cpu = zip(*pairs, strict=True)
    return statistics.median(seconds), statistics.median(cpu)


def rows_of(taken: Sequence[Taken], n_prompt: int) -> list[tuple[object, ...]]:
    """Return the rows of the table. The last column compares CPU times of decoded tokens."""
    first = _medians(taken[0].token)[1]
    rows: list[tuple[object, ...]] = []
    for one in taken:
        (prompt_s, prompt_cpu), (token_s, token_cpu) = _medians(one.prompt), _medians(one.token)
        scratch = sum(device.nbytes[Home.SCRATCH] for device in one.runner.mesh.devices)
        rows.append(
            (
                *(one.runner.n_ubatch, scratch / 2**20, scratch / 2**10 / one.runner.n_ubatch),
                *(f"{n_prompt / prompt_s:.0f}", f"{n_prompt / prompt_cpu:.0f}", 1e3 * prompt_s),
                *(1e3 * token_s, 1e3 * token_cpu, token_cpu / first),
            )
        )
    return rows


def measure(options: Sequence[Options], source: str, n_prompt: int, n_gen: int, repeats: int) -> list[Taken]:
    taken: list[Taken] = []
    with ExitStack() as stack:
        for wanted in options:
            sys.stderr.write(f"loading with -ub {wanted.n_ubatch}\n")
            runner = Runner(wanted, Synthetic(source) if _is_synthetic(source) else None)
            stack.callback(runner.close)
            taken.append(Taken(runner, Timer(runner, n_prompt + n_gen)))
            Taken(runner, taken[-1].timer).run(n_prompt, 1)  # records the steps
        for i in range(repeats):
            sys.stderr.write(f"run {i + 1} of {repeats}\n")
            for one in taken if i % 2 == 0 else reversed(taken):
                one.run(n_prompt, n_gen)
        title = f"{source}: a prompt of {n_prompt} tokens, then {n_gen} tokens"
        load = f"medians of {repeats} runs in turn, load {os.getloadavg()[0]:.1f}"
        table(f"{title}; {load}", COLUMNS, rows_of(taken, n_prompt))
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
    parser.add_argument("-n", "--n-gen", type=int, default=32, metavar="N", help="(default: 32)")
    parser.add_argument("-r", "--repeats", type=int, default=5, metavar="N", help="(default: 5)")
    args = parser.parse_args(argv)
    with exit_on_errors():
        n_prompt = whole_number("-p", args.n_prompt, 1, 1 << 17)
        n_gen, repeats = (
            whole_number("-n", args.n_gen, 1, 1 << 17),
            whole_number("-r", args.repeats, 1, 1000),
        )
        sizes = [
            whole_number("-ub", number_of(word), 1, MAX_ROWS) for word in values_of("-ub", args.ubatch_size)
        ]
        devices = device_list("devices", args.device) or ()
        options = [Options.of(args.model, devices=devices, n_ctx=n_prompt + n_gen, n_ubatch=n) for n in sizes]
        measure(options, args.model, n_prompt, n_gen, repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
