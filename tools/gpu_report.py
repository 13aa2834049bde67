"""`vkbackend gpu-report`: check and measure GPUs; write one Markdown and one JSON file.

The first parts verify every op, compare layers of real models with numpy, and find the fastest ops. Later
parts measure the copy rate and each op's rate relative to it. They also measure decode and prefill of
synthetic models (1B, 8B, 30B with experts) after 0, 4,096 and 32,768 tokens. The last parts measure
all-reduces of each pair of devices, compile time, and llama.cpp if llama-bench is installed. Each part runs
in its own process, so a lost device or a hang costs one case. Both files are rewritten after every part, list
unfinished cases, and contain no host name, user name or path. The exit code is 1 if a check failed or a part
could not finish.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from vkbackend.checks import finite_number
from vkbackend.env import CACHE
from vkbackend.errors import InvalidArgument, UnsupportedFeature
from vkbackend.models.arguments import HOST, device_list
from vkbackend.tools.console import console, printable
from vkbackend.tools.report.children import Job, deal, run_job
from vkbackend.tools.report.document import NAME, Report
from vkbackend.tools.report.machine import machine
from vkbackend.tools.report.parts import PARTS
from vkbackend.tools.report.worker import DEVICES

LOOK_S = 120.0  # Time limit of the process that lists devices.
# VKBACKEND_TIMEOUT is WAITED times a case's deadline, so a hang raises an error before its process is killed.
WAITED = 0.8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-dev", "--device", dest="devices", metavar="LIST",
        help="the devices, comma-separated (default: all GPUs; without any, all devices)")  # fmt: skip
    add("--minutes", type=float, default=10.0, metavar="N",
        help="about how long all parts together may take (default: 10)")  # fmt: skip
    add("--parts", metavar="LIST", help=f"only these parts: {','.join(PARTS)} (default: all)")
    add("-o", "--output", default=NAME, metavar="FOLDER",
        help=f"where {NAME}.md and {NAME}.json go (default: {NAME})")  # fmt: skip


def chosen_parts(text: str | None) -> list[str]:
    """Return the parts, the most valuable first. Raises InvalidArgument."""
    if text is None:
        return list(PARTS)
    asked = [word.strip() for word in text.split(",")]
    for word in asked:
        if word not in PARTS:
            raise InvalidArgument(f"--parts {word!r} is unknown; there are: {', '.join(PARTS)}")
    return [name for name in PARTS if name in asked]


def run(args: argparse.Namespace) -> int:
    minutes = finite_number("--minutes", args.minutes, 0.0, 24 * 60.0)
    parts, folder = chosen_parts(args.parts), Path(args.output)
    words = device_list("devices", args.devices)
    if words and HOST in words:
        raise InvalidArgument(
            "numpy is the reference that devices are checked against; pass one of `vkbackend devices`"
        )
    report = Report(minutes, datetime.now(UTC).strftime("%Y-%m-%d"), machine())
    report.save(folder)  # Fails early if the folder is read-only.
    with tempfile.TemporaryDirectory(prefix="vkbackend-report-") as scratch:
        _measure(report, parts, words, folder, Path(scratch))
    out = console()
    problems, unfinished = report.problems(), report.unfinished()
    for line in [*problems, *unfinished]:
        out.print(printable(line), markup=False, soft_wrap=True)
    out.print(f"{len(problems)} wrong or failed, {len(unfinished)} unfinished; {NAME}.md, {NAME}.json")
    return 1 if problems else 0


def _measure(
    report: Report, parts: Sequence[str], words: Sequence[str] | None, folder: Path, scratch: Path
) -> None:
    began, seconds, err = time.monotonic(), 60 * report.minutes, console(stderr=True)
    # The report measures a start without caches.
    environment = {CACHE: str(scratch / "cache")}
    with err.status("") as status:

        def show(name: str, device: str, case: str, done: int, n: int) -> None:
            spent = time.monotonic() - began
            place = f"[{spent / 60:.1f} of {report.minutes:g} min] {name} {device}"
            status.update(printable(f"{place}: {done + 1}/{n} {case}")[:150])

        def job(
            part: str, group: Sequence[str], until: float, deadline_s: float, variables: dict[str, str]
        ) -> Job:
            variables = environment | {"VKBACKEND_TIMEOUT": str(round(WAITED * deadline_s))} | variables
            return Job(part, tuple(group), until, deadline_s, variables, scratch)

        listed = run_job(job(DEVICES, words or (), began + LOOK_S, LOOK_S, {}), lambda *_: None)
        if not listed.rows:
            raise UnsupportedFeature(listed.unfinished or listed.failed[0][1])
        report.devices = listed.rows
        indices = [str(row["index"]) for row in listed.rows]
        began = time.monotonic()
        ends = deal([PARTS[name].share for name in parts], seconds, began)
        for name, end in zip(parts, ends, strict=True):
            part, at = PARTS[name], time.monotonic()
            groups = part.groups(indices)
            report.parts[name] = []
            untils = deal([1.0] * len(groups), max(0.0, end - at), at)
            for group, until in zip(groups, untils, strict=True):
                where = "+".join(group)
                asked = job(name, group, until, part.deadline_s, dict(part.environment))
                outcome = run_job(asked, partial(show, name, where))
                report.parts[name].append(outcome)
                report.seconds[name] = time.monotonic() - at
                report.save(folder)
                count = f"{len(outcome.done)} of {len(outcome.cases)} cases"
                err.print(printable(f"{name} {where}: {count}, {len(outcome.failed)} failed"), markup=False)


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["gpu-report", *sys.argv[1:]]))
