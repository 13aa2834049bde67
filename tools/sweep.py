"""`vkbackend sweep`: measure tokens per second as the context grows.

At every depth the command times a prompt of --n-prompt tokens, then --n-gen single tokens. The flag --plot
draws the table with matplotlib (extra "plot").
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from vkbackend.checks import whole_number
from vkbackend.errors import InvalidArgument
from vkbackend.tools.console import console, write_json, write_md
from vkbackend.tools.flags.runner import add_model_arguments, open_models, open_runner
from vkbackend.tools.measure.plots import check_plot, plotting, save
from vkbackend.tools.measure.timing import Test, Timer

COLUMNS = ("model", "depth", "pp t/s", "tg t/s")


@dataclass(frozen=True, slots=True)
class Point:
    model: str
    depth: int
    pp: float
    tg: float

    def cells(self) -> tuple[str, ...]:
        return self.model, str(self.depth), f"{self.pp:.2f}", f"{self.tg:.2f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-p", "--n-prompt", type=int, default=512, metavar="N",
        help="tokens of the prompt timed at each depth; depths grow by this many (default: 512)")  # fmt: skip
    add("-n", "--n-gen", type=int, default=32, metavar="N",
        help="single tokens timed at each depth (default: 32)")  # fmt: skip
    add("-c", "--ctx-size", dest="n_ctx", type=int, default=4096, metavar="N",
        help="the largest context (default: 4096)")  # fmt: skip
    add("-o", "--output", choices=("md", "csv", "json"), default="md", help="output format (default: md)")
    add("--plot", metavar="FILE", help="draw both rates over the depth into a .png, .svg or .pdf file")
    add_model_arguments(parser)


def measure(args: argparse.Namespace) -> Iterator[Point]:
    n_prompt = whole_number("--n-prompt", args.n_prompt, 1, 1 << 20)
    n_gen = whole_number("--n-gen", args.n_gen, 1, 1 << 20)
    n_ctx = whole_number("n_ctx", args.n_ctx, 1, 1 << 24)
    if n_prompt + n_gen > n_ctx:
        raise InvalidArgument(
            f"a context of {n_ctx} has no room for {n_prompt} + {n_gen} tokens; "
            "give a larger -c, or smaller -p and -n"
        )
    err = console(stderr=True)
    with ExitStack() as stack:
        for gguf in open_models(args, stack):
            with ExitStack() as loaded:
                runner = open_runner(gguf, args, n_ctx=args.n_ctx)
                loaded.callback(runner.close)
                timer, name = Timer(runner, n_ctx), gguf.paths[0].stem
                timer.warm_up(Test(n_prompt, n_gen))
                for depth in range(0, n_ctx - n_prompt - n_gen + 1, n_prompt):
                    err.print(f"{name}: depth {depth}", markup=False)
                    # The cache already holds the tokens before `depth` from the previous points.
                    pp = n_prompt / timer.after(depth, n_prompt, 0)
                    yield Point(name, depth, pp, n_gen / timer.after(depth + n_prompt, 0, n_gen))


def run(args: argparse.Namespace) -> int:
    if args.plot:
        check_plot(args.plot)
    points: list[Point] = []
    write = csv.writer(sys.stdout).writerow if args.output == "csv" else write_md
    for point in measure(args):
        if args.output != "json":
            if not points:  # arguments are valid now
                write(COLUMNS)
                if args.output == "md":
                    write(["---", "---:", "---:", "---:"])
            write(point.cells())
            sys.stdout.flush()
        points.append(point)
    if args.output == "json":
        write_json([asdict(point) for point in points], indent=1)
    if args.plot:
        draw(points, args.plot)
    return 0


def draw(points: Sequence[Point], path: str) -> None:
    """Draw prefill and decode with a line per model. Raises InvalidArgument if `path` cannot be written."""
    figure, axes = plotting().subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, kind, title in zip(axes, ("pp", "tg"), ("prefill", "decode"), strict=True):
        for model in dict.fromkeys(point.model for point in points):
            of_model = [point for point in points if point.model == model]
            axis.plot(
                [p.depth for p in of_model], [getattr(p, kind) for p in of_model], marker="o", label=model
            )
        axis.set(title=title, xlabel="tokens in the cache", ylabel="tokens per second", ylim=(0, None))
    axes[0].legend()
    save(figure, path)


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["sweep", *sys.argv[1:]]))
