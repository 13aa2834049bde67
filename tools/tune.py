"""`vkbackend tune`: measure which ops multiply matrices fastest, and remember the ranking for this driver.

Every op is timed on the same matrices, in all types of the op, with 1, 4, 12 and 128 rows. Ops that read
rounded activations include 4/7 of the time to round activations. The ranking is stored per driver and
version, for all devices of the driver, so that results have equal bits. Pass all devices of the driver; their
times are added. An op replaces the built-in choice if it takes less than 0.9 of the choice's time.

Each kind of pinned host memory is measured as well: how fast shaders read it, how fast it is copied, and both
at once. Weights in host memory use the kind that is read fastest.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from vkbackend import cache_folder, env
from vkbackend.errors import InvalidArgument
from vkbackend.meta.host_memory import chosen_kind, forget_host_memory, measure_host_memory
from vkbackend.models.arguments import device_list
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.ops import measured
from vkbackend.runtime import Device
from vkbackend.tools.console import console, printable, table
from vkbackend.tools.measure import matrix_times
from vkbackend.tools.report.host_memory import HEAD, cells


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-dev", "--device", dest="devices", metavar="LIST", default="0",
        help="all devices of a driver (default: 0)")  # fmt: skip
    add("--forget", action="store_true", help="remove this driver's table, so that the built-in rules apply")


def run(args: argparse.Namespace) -> int:
    out, err = console(), console(stderr=True)
    devices = open_devices(device_list("devices", args.devices) or ("0",))
    try:
        infos = [device.physical for device in devices if device.physical]
        if len(infos) < len(devices):
            raise InvalidArgument("numpy has one op for each case; give one of `vkbackend devices`")
        info = infos[0]
        if any(measured.entry_name(i) != measured.entry_name(info) for i in infos):
            raise InvalidArgument(
                f"--device {args.devices!r} names devices of several drivers; tune one driver at a time"
            )
        if args.forget:
            measured.save(info, {})
            for device in devices:
                forget_host_memory(device)
            return 0
        if not cache_folder.writable():
            raise InvalidArgument("no cache folder to keep the measured table in; set VKBACKEND_CACHE to one")
        times = []
        for device in devices:
            err.print(f"measuring {printable(device.name)}", markup=False)
            times.append(matrix_times.times_of(device))
        ranking = matrix_times.ranked(times, replace(devices[0].limits, choices=()))
        rows = [
            (name, op, *(times[0][name][op].get(kind, "") for kind in matrix_times.TYPES))
            for name in ranking
            for op in ranking[name]
        ]
        title = f"{printable(info.driver)}: us, the fastest first"
        out.print(table(title, ("rows", "op", *matrix_times.TYPES), rows))
        if rows_of_host := [row for device in devices for row in host_rows(device)]:
            out.print(table("pinned host memory", ("device", *HEAD, ""), rows_of_host))
        if measured.save(info, ranking):
            err.print(f"kept in {printable(str(env.cache_dir()))}", markup=False, soft_wrap=True)
    finally:
        for device in devices:
            device.close()
    return 0


def host_rows(device: Device) -> list[list[str]]:
    """Return a row of rates for each kind of host memory, and which one is chosen."""
    rows = []
    for name, of in measure_host_memory(device).items():
        kind, *rates = cells(name, of)
        chosen = "chosen" if name == chosen_kind(device) else ""
        rows.append([device.name, str(kind), *(f"{rate:.3g}" for rate in rates), chosen])
    return rows


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["tune", *sys.argv[1:]]))
