"""`vkbackend bench`: measure tokens per second in prefill and decode, with llama-bench's flags and columns.

"weight GB/s" is the rate at which all devices together read weights, and "% of copy" is its ratio to the copy
rate. "us/reduce" is host time per all-reduce. "predicted t/s" is the rate that `plan` predicts for tokens at
the beginning of the context. Measured rates are stored and improve later predictions. "load GB/s" is the
loading rate, and "% of read" is its ratio to the rate at which the file is read again. The formats csv and
json use llama-bench's fields. Every test is warmed up first. `--compare llama-cpp` also runs llama-cpp-python
in turns on the same model and devices. This adds columns with llama.cpp's rate and the ratio of both rates.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from vkbackend import __version__
from vkbackend.checks import number_of, whole_number
from vkbackend.errors import InvalidArgument
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.gguf.reader import GGUF
from vkbackend.tools import bench_parallel
from vkbackend.tools.console import console, printable, size, write_json, write_md
from vkbackend.tools.flags.llama_cpp import add_common_arguments
from vkbackend.tools.flags.runner import add_model_arguments, open_models, open_runner
from vkbackend.tools.flags.speculation import add_speculation_arguments
from vkbackend.tools.flags.sweeps import values_of
from vkbackend.tools.measure.compare import LlamaCpp, check_comparable
from vkbackend.tools.measure.predicted import TokenTime
from vkbackend.tools.measure.synthetic import Synthetic
from vkbackend.tools.measure.timing import (
    Test,
    Timer,
    Timing,
    copy_rate,
    describe,
    read_rate,
    weight_nbytes_per_step,
)

MAX_TOKENS = 1 << 20
MAX_DELAY_S = 3600
BACKENDS = {"VulkanDevice": "Vulkan", "KomputeDevice": "Kompute", "NumpyDevice": "numpy"}
COLUMNS = (
    "model", "size", "params", "backend", "devices", "ngl", "sm", "ts", "test", "t/s",
    "weight GB/s", "% of copy", "us/reduce", "predicted t/s", "load s", "load GB/s", "% of read",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Loading:
    """The seconds until a step can run, and the rates of loading and of reading the file in bytes per
    second."""

    seconds: float
    rate: float
    read_rate: float | None  # None: no file

    def cells(self) -> list[str]:
        share = f"{100 * self.rate / self.read_rate:.1f}" if self.read_rate else "-"
        return [f"{self.seconds:.2f}", f"{self.rate / 1e9:.3f}", share]


@dataclass(frozen=True, slots=True)
class Row:
    """`theirs` is llama.cpp's timing. Rates are in bytes per second."""

    model: dict[str, Any]
    runner: dict[str, Any]
    timing: Timing
    load: Loading
    weight_rate: float | None
    copy_rate: float
    predicted: float | None = None  # tokens per second
    theirs: Timing | None = None
    swept: dict[str, str] = field(default_factory=dict)  # swept flag -> its value
    time: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))

    def cells(self) -> list[str]:
        t = self.timing
        cells = [
            printable(self.model["model_type"]),
            size(self.model["model_size"]),
            f"{self.model['model_n_params'] / 1e6:.2f} M",
            self.runner["backends"],
            printable("/".join(self.runner["devices"])),
            str(self.runner["n_gpu_layers"]),
            self.runner["split_mode"],
            self.runner["tensor_split"],
            t.test.name,
            f"{t.mean:.2f} ± {t.spread:.2f}",
            "-" if self.weight_rate is None else f"{self.weight_rate / 1e9:.3f}",
            "-" if self.weight_rate is None else f"{100 * self.weight_rate / self.copy_rate:.1f}",
            "-" if t.reduce_us is None else f"{t.reduce_us:.0f}",
            "-" if self.predicted is None else f"{self.predicted:.2f}",
            *self.load.cells(),
            *map(printable, self.swept.values()),
        ]
        if self.theirs:
            cells += [
                f"{self.theirs.mean:.2f} ± {self.theirs.spread:.2f}",
                f"{t.mean / self.theirs.mean:.2f}",
            ]
        return cells

    def record(self) -> dict[str, Any]:
        t = self.timing
        ns = [round(1e9 * s) for s in t.seconds]
        record = (
            {"build": f"vkbackend {__version__}", "test_time": self.time}
            | self.model
            | self.runner
            | {
                "n_prompt": t.test.n_prompt,
                "n_gen": t.test.n_gen,
                "n_depth": t.test.n_depth,
                "avg_ns": sum(ns) // len(ns),
                "stddev_ns": round(statistics.stdev(ns)) if len(ns) > 1 else 0,
                "avg_ts": t.mean,
                "stddev_ts": t.spread,
                "samples_ns": ns,
                "samples_ts": list(t.rates),
                "load_s": self.load.seconds,
                "load_bytes_per_s": self.load.rate,
                "read_bytes_per_s": self.load.read_rate,
                "weight_bytes_per_s": self.weight_rate,
                "copy_bytes_per_s": self.copy_rate,
                "us_per_reduce": t.reduce_us,
                "predicted_ts": self.predicted,
            }
        )
        if self.theirs:
            record |= {"llama_cpp_avg_ts": self.theirs.mean, "llama_cpp_samples_ts": list(self.theirs.rates)}
            record["ratio"] = t.mean / self.theirs.mean
        return record

    def fields(self) -> dict[str, Any]:
        return {
            key: "/".join(map(str, value)) if isinstance(value, list) else value
            for key, value in self.record().items()
            if "samples" not in key
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-p", "--n-prompt", metavar="LIST", action="append",
        help="prompt lengths to time, comma-separated, one by one, or a range such as 16-64+16 or "
        "16-64*2; 0: none (default: 512)")  # fmt: skip
    add("-n", "--n-gen", metavar="LIST", action="append",
        help="numbers of generated tokens to time, in the same form; 0: none (default: 128)")  # fmt: skip
    add(
        "-pg",
        action="append",
        default=[],
        metavar="PP,TG",
        help="a prompt and then single tokens, timed together",
    )
    add("-d", "--n-depth", metavar="LIST", action="append",
        help="tokens in the cache before a test, in the same form (default: 0)")  # fmt: skip
    add("-r", "--repetitions", type=int, default=5, metavar="N", help="times each test is run (default: 5)")
    add("-o", "--output", choices=("md", "csv", "json", "jsonl"), default="md",
        help="output format (default: md)")  # fmt: skip
    add("--no-warmup", action="store_true", help="time the first run too")
    add("--parallel", metavar="LIST",
        help="measure concurrent callers, for example 1,4,16: total and single rates, the engine in this "
        "process and in its own; each asks for -r texts of -n tokens (32)")  # fmt: skip
    add("--plot", metavar="FILE", help="draw --parallel into a .png, .svg or .pdf file")
    add("--compare", choices=("llama-cpp",),
        help="run llama-cpp-python on the same file and devices in turn, and print the ratio")  # fmt: skip
    add("--delay", type=float, default=0.0, metavar="S", help="seconds between tests (default: 0)")
    add_common_arguments(parser)
    add_speculation_arguments(parser)
    add_model_arguments(parser)


def numbers(flag: str, text: str) -> list[int]:
    return [whole_number(flag, number_of(word.strip()), 0, MAX_TOKENS) for word in values_of(flag, text)]


def tests_of(args: argparse.Namespace) -> list[Test]:
    """Raises InvalidArgument if the flags request no test."""
    pairs = [(p, 0) for p in numbers("--n-prompt", ",".join(args.n_prompt or ["512"])) if p]
    pairs += [(0, n) for n in numbers("--n-gen", ",".join(args.n_gen or ["128"])) if n]
    for text in args.pg:
        if len(pair := numbers("-pg", text)) != 2 or not sum(pair):
            raise InvalidArgument(f"-pg {text!r}: expected two numbers of tokens, for example 512,128")
        pairs.append((pair[0], pair[1]))
    tests = [Test(p, n, d) for d in numbers("--n-depth", ",".join(args.n_depth or ["0"])) for p, n in pairs]
    if not tests:
        raise InvalidArgument("nothing to time: both -p and -n are 0")
    return tests


def settings(runner: Runner) -> dict[str, Any]:
    options, devices = runner.options, runner.mesh.devices
    shares = options.shares or (1,) * len(devices)
    layers, held = runner.model.n_layer + 1, options.n_gpu_layers
    return {
        "backends": ",".join(dict.fromkeys(BACKENDS[type(d).__name__] for d in devices if not d.node)),
        "devices": runner.device_names(),
        "drivers": [
            f"{of.driver} {of.driver_version}" if (of := device.physical) else device.name
            for device in devices
        ],
        "n_gpu_layers": min(held, layers) if isinstance(held, int) else layers,
        "split_mode": options.split_mode,
        "tensor_split": "/".join(f"{share:g}" for share in shares),
        "n_ubatch": runner.n_ubatch,
        "type_k": options.type_k,
        "type_v": options.type_v,
    }


def measure(args: argparse.Namespace) -> Iterator[Row]:
    tests = tests_of(args)
    if args.compare:
        check_comparable(args)
    whole_number("--repetitions", args.repetitions, 1, 1000)
    n_ctx = max(t.n_depth + t.n_tokens for t in tests)
    if not 0 <= args.delay <= MAX_DELAY_S:
        raise InvalidArgument(f"--delay={args.delay:g}: expected seconds, 0..{MAX_DELAY_S}")
    for line in getattr(args, "sweep", [args]):
        with ExitStack() as stack:
            for gguf in open_models(line, stack):
                yield from _measure_model(gguf, line, tests, n_ctx)


def _measure_model(gguf: GGUF, args: argparse.Namespace, tests: Sequence[Test], n_ctx: int) -> Iterator[Row]:
    err, model = console(stderr=True), describe(gguf)
    began = time.perf_counter()
    runner = open_runner(gguf, args, n_ctx=n_ctx)
    load_s = time.perf_counter() - began
    with ExitStack() as stack:
        stack.callback(runner.close)
        loaded = sum(info.nbytes for info in gguf.tensors.values()) / runner.mesh.stores.load_s
        read = None if isinstance(gguf, Synthetic) else read_rate(gguf.paths)
        loading = Loading(load_s, loaded, read)
        other = stack.enter_context(LlamaCpp(gguf, runner, n_ctx)) if args.compare else None
        timer, copied = Timer(runner, n_ctx), copy_rate(runner)
        for i, test in enumerate(tests):
            err.print(f"[{i + 1}/{len(tests)}] {model['model_type']} {test.name}", markup=False)
            if not args.no_warmup:
                timer.warm_up(test)
            if args.delay and i:
                time.sleep(args.delay)
            theirs = None
            if other:
                timing, theirs = other.alternate(timer, test, args.repetitions)
            else:
                timing = timer.time(test, args.repetitions)
            rate = predicted = None
            if not test.n_prompt:
                if not test.n_depth:  # a prediction does not include attention over the context
                    token = TokenTime(runner)
                    predicted = token.rate
                    token.learn(statistics.median(timing.seconds) / test.n_gen)
                rate = weight_nbytes_per_step(runner) * test.n_gen / min(timing.seconds)
            swept = getattr(args, "swept", {})
            yield Row(model, settings(runner), timing, loading, rate, copied, predicted, theirs, swept=swept)


def run(args: argparse.Namespace) -> int:
    if args.parallel:
        sizes = numbers("--parallel", args.parallel)
        (n_gen, *_) = numbers("--n-gen", ",".join(args.n_gen or ["32"]))
        return bench_parallel.run(args, sizes, n_gen)
    if args.speculation or args.draft or args.hf_draft:
        raise InvalidArgument("drafts need texts of a model; measure them with --parallel")
    if args.plot:
        raise InvalidArgument("--plot needs --parallel; give that, or use vkbackend sweep")
    rows: list[Row] = []
    columns = [*COLUMNS, *getattr(args, "swept", {}), *(["llama.cpp t/s", "ratio"] if args.compare else [])]
    table = csv.writer(sys.stdout)
    for row in measure(args):
        if args.output == "md":
            if not rows:  # arguments are valid now
                write_md(columns)
                write_md(["---"] * 9 + ["---:"] * (len(columns) - 9))
            write_md(row.cells())
        elif args.output == "csv":
            fields = row.fields()
            if not rows:
                table.writerow(fields)
            table.writerow(fields.values())
        elif args.output == "jsonl":
            write_json(row.record())
        rows.append(row)
        sys.stdout.flush()
    if args.output == "json":
        write_json([row.record() for row in rows], indent=1)
    elif args.output == "md":
        drivers = dict.fromkeys(driver for row in rows for driver in row.runner["drivers"])
        sys.stdout.write(f"\nbuild: vkbackend {__version__}; {printable('; '.join(drivers))}\n")
    return 0


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["bench", *sys.argv[1:]]))
