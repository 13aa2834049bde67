"""`vkbackend tune`: measure which op multiplies matrices fastest, and remember it for the driver.

Every op that the devices can run is timed on the same matrices, by 1, 4 and 32 rows. The table is kept per
driver and version, for all its devices alike (their results must have the same bits), so give all of them at
once: their times are added up. An op displaces the one that goes by the rules if it needs less than 0.9 of
its time.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from vkbackend import choices
from vkbackend.errors import InvalidArgument
from vkbackend.limits import Limits
from vkbackend.models.arguments import device_list
from vkbackend.models.runner import open_devices
from vkbackend.ops import OPS, mat_op
from vkbackend.runtime import Device
from vkbackend.tools.bench_ops import time_case
from vkbackend.tools.console import console, printable, table
from vkbackend.tools.op_cases_matrix import MatLane, MatMul, MatTile, MatVec, MatWave

HELP = "Measure which ops suit the devices"
ROWS = {"one": 1, "few": 4, "many": 128}  # what stands for each class
TYPES = ("f16", "q8_0", "q4_0", "q4_k")
SHAPES = ((2048, 2048), (256, 1024))  # n, k
GAIN = 0.9
CASES = {
    "mat_vec": MatVec,
    "mat_wave": MatWave,
    "mat_lane": MatLane,
    "mat_mul": MatMul,
    "mat_tile": MatTile,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-dev", "--device", metavar="LIST", default="0", help="all devices of a driver (default: 0)")
    add("--forget", action="store_true", help="remove the driver's table instead, and go by the rules again")


def times_of(device: Device, ms: float = 20.0) -> dict[str, dict[str, float]]:
    """Microseconds by class of rows and op, summed over types and shapes."""
    out: dict[str, dict[str, float]] = {}
    for name, rows in ROWS.items():
        able = [op for op in choices.CANDIDATES[name] if device.limits.features.issuperset(OPS[op].needs)]
        cases = [(kind, n, k) for kind in TYPES for n, k in SHAPES]
        out[name] = {
            op: sum(
                (row.us_cpu or row.us_min)
                for row in (time_case(device, CASES[op](kind, n, k, rows), 3, ms) for kind, n, k in cases)
            )
            for op in able
        }
    return out


def winners(times: Iterable[dict[str, dict[str, float]]], limits: Limits) -> choices.Table:
    """Of each class of rows the op of the least time, the rules' one unless that is clearly slower."""
    total: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for of_device in times:
        for name, by_op in of_device.items():
            for op, us in by_op.items():
                total[name][op] += us
    found: choices.Table = {}
    for name, by_op in total.items():
        rule = mat_op(limits, ROWS[name])
        best = min(by_op, key=by_op.__getitem__)
        found[name] = best if by_op[best] < GAIN * by_op[rule] else rule
    return found


def run(args: argparse.Namespace) -> int:
    out, err = console(), console(stderr=True)
    devices = open_devices(device_list(args.device) or ("0",))
    try:
        infos = [device.info for device in devices if hasattr(device, "info")]
        if len(infos) < len(devices):
            raise InvalidArgument("numpy has one op for each case; give one of `vkbackend devices`")
        info = infos[0]
        if any(choices.path_of(i) != choices.path_of(info) for i in infos):
            raise InvalidArgument(
                f"--device {args.device!r} names devices of several drivers; tune each driver by itself"
            )
        if args.forget:
            choices.save(info, {})
            return 0
        times = []
        for device in devices:
            err.print(f"measuring {printable(device.name)}", markup=False)
            times.append(times_of(device))
        found = winners(times, replace(devices[0].limits, choices=()))
        rows = [
            (name, op, us, "chosen" if found[name] == op else "")
            for name in found
            for op, us in sorted(times[0][name].items())
        ]
        out.print(table(printable(info.driver), ("rows", "op", "us", ""), rows))
        path = choices.save(info, found)
        err.print(f"kept in {printable(str(path))}", markup=False)
    finally:
        for device in devices:
            device.close()
    return 0


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["tune", *sys.argv[1:]]))
