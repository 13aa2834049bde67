"""`vkbackend bench --parallel 1,4,16`: measure an engine with concurrent callers.

Columns are total tokens per second, and milliseconds to the first token and between tokens (median, 99th
percentile). The last two columns are the share of prompt tokens that were reused from other requests, and the
share of drafted tokens that were right.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence

from vkbackend.checks import whole_number
from vkbackend.errors import InvalidArgument
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.llm import LLM
from vkbackend.models.options import Options
from vkbackend.step import MAX_RUNS
from vkbackend.tools.console import byte_progress, console, printable, tell_notes, write_json, write_md
from vkbackend.tools.flags.options import fields_given
from vkbackend.tools.flags.placement import host_patterns
from vkbackend.tools.flags.runner import settle_models
from vkbackend.tools.measure.parallel import Load, longest, measure
from vkbackend.tools.measure.plots import check_plot, plotting, save

COLUMNS = (
    "model", "devices", "engine", "callers", "t/s",
    "first ms p50", "first ms p99", "next ms p50", "next ms p99", "shared %", "accepted %",
)  # fmt: skip


def cells(model: str, devices: str, load: Load) -> list[str]:
    return [
        printable(model),
        printable(devices),
        "own process" if load.process else "this process",
        str(load.n),
        f"{load.tokens_per_s:.1f}",
        f"{load.ttft_p50:.1f}",
        f"{load.ttft_p99:.1f}",
        f"{load.itl_p50:.2f}",
        f"{load.itl_p99:.2f}",
        f"{100 * load.hit_rate:.0f}",
        "-" if load.accepted is None else f"{100 * load.accepted:.0f}",
    ]


def measured(args: argparse.Namespace, sizes: Sequence[int], n_gen: int) -> Iterator[tuple[str, LLM, Load]]:
    err = console(stderr=True)
    for path in args.model:
        for process in (False, True):
            given = {**fields_given(args, Options), "n_slots": max(sizes), "n_ctx": longest(n_gen) + 1}
            given.pop("path", None)
            if args.host_tensors:
                with GGUF.open(path) as gguf:
                    given["override_tensor"] = host_patterns(args, gguf.tensors)
            with byte_progress(err, f"loading {path}", then="compiling shaders") as progress:
                llm = LLM(path, process=process, progress=progress, **given)
            tell_notes(getattr(args, "notes", ()) if not process else (), err)
            with llm:
                for n in sizes:
                    where = "a process of its own" if process else "this process"
                    err.print(f"{n} callers, the engine in {where}", markup=False)
                    yield path, llm, measure(llm, n, args.repetitions, n_gen, process=process)


def run(args: argparse.Namespace, sizes: Sequence[int], n_gen: int) -> int:
    for n in sizes:
        whole_number("--parallel", n, 1, MAX_RUNS)
    whole_number("--n-gen", n_gen, 2, 4096)
    if len(getattr(args, "sweep", ())) > 1:
        raise InvalidArgument("--parallel measures one configuration; give each flag one value")
    settle_models(args)
    if not args.model:
        raise InvalidArgument("no model was given; pass one with -m FILE")
    if args.plot:
        check_plot(args.plot)
    write = csv.writer(sys.stdout).writerow
    rows: list[tuple[str, str, Load]] = []
    for path, llm, load in measured(args, sizes, n_gen):
        row = path, "/".join(llm.device_names), load
        if args.output == "csv":
            record = record_of(*row)
            if not rows:
                write(record)
            write(record.values())
        elif args.output == "jsonl":
            write_json(record_of(*row))
        elif args.output == "md":
            if not rows:
                write_md(COLUMNS)
                write_md(["---"] * 3 + ["---:"] * (len(COLUMNS) - 3))
            write_md(cells(*row))
        rows.append(row)
        sys.stdout.flush()
    if args.output == "json":
        write_json([record_of(*row) for row in rows], indent=1)
    if args.plot:
        draw([load for *_, load in rows], args.plot)
    return 0


def record_of(model: str, devices: str, load: Load) -> dict[str, object]:
    return {"model": model, "devices": devices, **load.record()}


def draw(loads: Sequence[Load], path: str) -> None:
    figure, axes = plotting().subplots(1, 2, figsize=(10, 4), layout="constrained")
    for process in (False, True):
        of_process = [load for load in loads if load.process == process]
        label, n = "own process" if process else "this process", [load.n for load in of_process]
        axes[0].plot(n, [load.tokens_per_s for load in of_process], marker="o", label=label)
        axes[1].plot(n, [load.itl_p50 for load in of_process], marker="o", label=f"{label}, median")
        axes[1].plot(
            n, [load.itl_p99 for load in of_process], marker="x", linestyle=":", label=f"{label}, p99"
        )
    titles = ("tokens per second", "tokens/s"), ("from token to token", "ms")
    for axis, (title, label) in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="callers", ylabel=label, ylim=(0, None))
        axis.legend()
    save(figure, path)
