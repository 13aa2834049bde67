"""`vkbackend bench-ops`: time the ops of a device, on the tests' cases and on matrices of real models.

A submission runs a case many times, and GPU timestamps time each run. The host times complete submissions on
devices without timestamps, and on software devices, where each timestamp would cause a stall. Columns are
case, op.variant, and minimum and median us per run. Software devices also have a column of CPU time, because
other programs affect CPU time least. The last columns are GB/s read and written, and GFLOP/s, at the minimum
time.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from dataclasses import asdict

from vkbackend.checks import finite_number, whole_number
from vkbackend.errors import OutOfDeviceMemory, VkbackendError
from vkbackend.models.arguments import device_list
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.tools.console import console, printable, write_json, write_md
from vkbackend.tools.measure.case_times import Row, time_case
from vkbackend.tools.op_cases.cases import cases_named

COLUMNS = ("device", "case", "runs", "us min", "us median", "us cpu", "GB/s", "GFLOP/s")


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


def measure(args: argparse.Namespace) -> Iterator[Row]:
    whole_number("--repetitions", args.repetitions, 1, 1000)
    finite_number("--ms", args.ms, 0.0, 500.0)
    whole_number("--cold", args.cold, 0, 1 << 20)
    cases = cases_named(args.case, args.shapes)
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
        raise VkbackendError("no case could run; see the reasons above")
    return 0


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["bench-ops", *sys.argv[1:]]))
