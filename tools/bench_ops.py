"""`vkbackend bench-ops`: time the ops on one device, on the very cases that the op tests check.

Beside the tests' small cases there are matrices of real models' shapes. A case is recorded many times over
into one submission; devices with timestamps time every repeat by itself, others (and software devices, where
a timestamp waits) whole submissions. Columns: the case; what ran (op.variant); us per run, the least and the
median; of software devices the CPU time of a run, which a busy machine changes least; GB/s of what it reads
and writes; GFLOP/s; both at the least time.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vkbackend.checks import finite_number, whole_number
from vkbackend.errors import InvalidArgument, OutOfDeviceMemory, VkbackendError
from vkbackend.models.arguments import device_list
from vkbackend.models.engine.open_devices import open_devices
from vkbackend.ops import Recorder
from vkbackend.recording import Dispatch, Recording, cut_long, derive_barriers
from vkbackend.runtime import Device
from vkbackend.tools.console import console, printable, write_json
from vkbackend.tools.op_cases.cases import BENCH_CASES, CASES
from vkbackend.tools.op_cases.setup import Case, Placed

COLUMNS = ("device", "case", "runs", "us min", "us median", "us cpu", "GB/s", "GFLOP/s")


@dataclass(frozen=True, slots=True)
class Row:
    """One case on one device; times in microseconds, bytes and operations of one run."""

    device: str
    case: str
    runs: str
    us_min: float
    us_median: float
    us_cpu: float | None  # of software devices
    nbytes: int
    flops: int

    def cells(self) -> tuple[str, ...]:
        rates = (f"{self.nbytes / self.us_min / 1e3:.3f}", f"{self.flops / self.us_min / 1e3:.3f}")
        times = (f"{self.us_min:.1f}", f"{self.us_median:.1f}", f"{self.us_cpu:.1f}" if self.us_cpu else "")
        return (printable(self.device), self.case, self.runs, *times, *rates)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-dev", "--device", dest="devices", metavar="NAME", default="0",
        help="the device, or several in turn (default: 0)")  # fmt: skip
    add("-c", "--case", metavar="REGEX", default="",
        help='only cases whose name matches, e.g. "Mat.*q4_0" (default: all)')  # fmt: skip
    add("--shapes", choices=("real", "tests", "all"), default="real",
        help="matrices of real models, the tests' small cases, or both (default: real)")  # fmt: skip
    add("-r", "--repetitions", type=int, default=5, metavar="N",
        help="timed submissions of each case, 1..1000 (default: 5)")  # fmt: skip
    add("--ms", type=float, default=20.0, metavar="T",
        help="how long a submission should take, in milliseconds (default: 20)")  # fmt: skip
    add("--cold", type=int, default=0, metavar="MIB",
        help="cycle through copies of a case that fill this many MiB, so that no cache holds "
        "them")  # fmt: skip
    add("-o", "--output", choices=("md", "csv", "json"), default="md", help="output format (default: md)")


def chosen(pattern: str, shapes: str) -> list[Case]:
    """The cases that `pattern` finds; raises InvalidArgument where that is none."""
    cases = [*(CASES if shapes != "real" else ()), *(BENCH_CASES if shapes != "tests" else ())]
    try:
        found = [case for case in cases if re.search(pattern, repr(case))]
    except re.error as error:
        raise InvalidArgument(f"--case {pattern!r} is not a regular expression: {error}") from None
    if not found:
        if shapes == "real" and any(re.search(pattern, repr(case)) for case in CASES):
            raise InvalidArgument(
                f"--case {pattern!r} matches small cases only; time them with --shapes tests"
            )
        names = sorted({type(case).__name__ for case in cases})
        raise InvalidArgument(f"--case {pattern!r} matches none of {len(cases)} cases of {', '.join(names)}")
    return found


# ---- timing ----


class Chain:
    """A case on a device, recorded `length` times over; `copies` sets of its arrays take turns."""

    def __init__(self, device: Device, case: Case, cold_nbytes: int = 0) -> None:
        self.device = device
        setup = case.setup(np.random.default_rng(0))
        self.placed = [Placed(device, setup)]
        try:
            while len(self.placed) * self.placed[0].buffer.nbytes < cold_nbytes:
                self.placed.append(Placed(device, setup))
        except BaseException:
            self.close()
            raise
        once = [c for c in self.placed[0].record(device.limits).accesses() if isinstance(c, Dispatch)]
        self.runs = " ".join(dict.fromkeys(f"{c.op}.{c.variant}" for c in once))
        self.n_dispatches = len(once)
        self.nbytes = sum(r.end - r.begin for c in once for r in (*c.reads, *c.writes))
        self.flops = sum(c.flops for c in once)

    def recording(self, length: int) -> Recording:
        recording = Recording(f"bench-ops {self.runs}")
        for i in range(length):
            placed = self.placed[i % len(self.placed)]
            placed.setup.record(Recorder(recording, self.device.limits), placed.views)
        return derive_barriers(cut_long(recording))

    def seconds(self, length: int, repeats: int) -> list[float]:
        """Seconds per run: of every run where the device keeps time, else of each submission."""
        device, timed = self.device, has_clock(self.device)
        recording = self.recording(length)
        build: Any = device.build  # only Vulkan devices take `timed`
        executable = build(recording, timed=True) if timed else build(recording)
        out: list[float] = []
        self.cpu_seconds = math.inf
        try:
            for i in range(repeats + 1):  # the first warms up
                began, cpu_began = time.perf_counter(), time.process_time()
                device.replay(executable)
                took = time.perf_counter() - began
                if not i:
                    continue
                self.cpu_seconds = min(self.cpu_seconds, (time.process_time() - cpu_began) / length)
                if timed:
                    us = np.array([us for _, us in executable.durations()])
                    out += (us.reshape(length, self.n_dispatches).sum(1) / 1e6).tolist()
                else:
                    out.append(took / length)
        finally:
            executable.close()
        return out

    def close(self) -> None:
        for placed in self.placed:
            placed.close()


def has_clock(device: Device) -> bool:
    """Whether a dispatch can be timed by itself without stopping the device for it."""
    info = device.physical
    return info is not None and not info.is_cpu and bool(info.limits["timestamp_valid_bits"])


def time_case(device: Device, case: Case, repeats: int, ms: float, cold_nbytes: int = 0) -> Row:
    """Time one case in submissions of about `ms` milliseconds."""
    chain = Chain(device, case, cold_nbytes)
    try:
        estimate = min(chain.seconds(1, 2))
        length = max(len(chain.placed), min(4096, round(ms / 1e3 / max(estimate, 1e-7))), 1)
        us = [1e6 * s for s in chain.seconds(length, repeats)]
        us_cpu = 1e6 * chain.cpu_seconds if device.limits.is_cpu else None
        times = min(us), statistics.median(us), us_cpu
        return Row(device.name, repr(case), chain.runs, *times, chain.nbytes, chain.flops)
    finally:
        chain.close()


# ---- the command ----


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """The rows, one after another; a case that a device cannot run is told on stderr and left out."""
    whole_number("--repetitions", args.repetitions, 1, 1000)
    finite_number("--ms", args.ms, 0.0, 500.0)
    whole_number("--cold", args.cold, 0, 1 << 20)
    cases = chosen(args.case, args.shapes)
    err = console(stderr=True)
    for spec in device_list("devices", args.devices) or ("0",):
        (device,) = open_devices([spec])
        try:
            for case in cases:
                if lacks := set(case.needs) - device.limits.features:
                    reason = f"{device.name} lacks {', '.join(sorted(lacks))}"
                    err.print(f"{case!r} left out: {printable(reason)}", markup=False, soft_wrap=True)
                    continue
                try:
                    yield time_case(device, case, args.repetitions, args.ms, args.cold << 20)
                except OutOfDeviceMemory as error:
                    err.print(f"{case!r} left out: {printable(str(error))}", markup=False, soft_wrap=True)
        finally:
            device.close()


def write_md(cells: Sequence[str]) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")


def run(args: argparse.Namespace) -> int:
    rows: list[Row] = []
    write = csv.writer(sys.stdout).writerow if args.output == "csv" else write_md
    for row in measure(args):
        if args.output != "json":
            if not rows:
                write(COLUMNS)
                if args.output == "md":
                    write(["---", "---", "---", "---:", "---:", "---:", "---:", "---:"])
            write(row.cells())
            sys.stdout.flush()
        rows.append(row)
    if args.output == "json":
        write_json([asdict(row) for row in rows], indent=1)
    if not rows:
        raise VkbackendError("no case could run; the reasons stand above")
    return 0


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["bench-ops", *sys.argv[1:]]))
