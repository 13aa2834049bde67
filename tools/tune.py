"""`vkbackend tune`: measure which ops multiply matrices fastest, and remember the ranking for this driver.

Every op is timed on the same matrices, in all types of the op, with 1, 4, 12, 24 and 128 rows. For ops that
read rounded activations, the time includes 4/7 of the time to round activations. The ranking is stored per
driver and version, for all devices of the driver, so that results have equal bits. Pass all devices of the
driver; their times are added. An op replaces the built-in choice if it takes less than 0.9 of the choice's
time.

Each kind of pinned host memory is measured as well: how fast shaders read it, how fast it is copied, and both
at once. Weights in host memory use the kind that is read fastest.

With several devices, exchanges between the first 2, 3, ... of them are measured. First, every way to exchange
is measured for sums of 4 KiB to 16 MiB. With the way that is best for the sum of one decoded token (16 KiB),
semaphores, flags and several numbers of segments submitted ahead are then measured for this sum. At last,
events and steps that are submitted in one call are measured with the ways that allow them, and 300 steps of
each are checked. The fastest ways are kept for these devices in this order, and `plan` uses their times for
predictions.
`--exchanges` measures only exchanges, also between devices of several drivers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from vkbackend import cache_folder, env
from vkbackend.errors import InvalidArgument
from vkbackend.figures import short
from vkbackend.meta.host_memory import chosen_kind, forget_host_memory, measure_host_memory
from vkbackend.meta.known_ways import Ahead, Choice, remember_choice
from vkbackend.meta.measured_ways import (
    SURE_STEPS,
    TOKEN_NBYTES,
    Measured,
    choice_of,
    keep,
    measure_ways,
)
from vkbackend.meta.options import AHEAD
from vkbackend.models.arguments import device_list
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.ops import measured
from vkbackend.runtime import SIGNALS, Device
from vkbackend.tools.console import console, printable, size, table
from vkbackend.tools.measure import matrix_times
from vkbackend.tools.report.host_memory import HEAD, cells


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-dev", "--device", dest="devices", metavar="LIST", default="0",
        help="all devices of a driver (default: 0)")  # fmt: skip
    add("--exchanges", action="store_true",
        help="measure only exchanges between the devices, which may have several drivers")  # fmt: skip
    add("--forget", action="store_true",
        help="remove the tables of this driver and of exchanges, so that built-in rules apply")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    names = device_list("devices", args.devices) or ("0",)
    groups = [names[:n] for n in range(2, len(names) + 1)]
    if args.exchanges and not groups:
        raise InvalidArgument(f"one device ({names[0]}) exchanges nothing; give two or more, as in -dev 0,1")
    if not args.exchanges:
        tune_ops(names, args)
    for group in groups:
        tune_exchanges(group, args.forget)
    return 0


def tune_ops(names: Sequence[str], args: argparse.Namespace) -> None:
    out, err = console(), console(stderr=True)
    devices = open_devices(names)
    try:
        infos = [device.physical for device in devices if device.physical]
        if len(infos) < len(devices):
            raise InvalidArgument("numpy has one op for each case; give one of `vkbackend devices`")
        info = infos[0]
        if any(measured.entry_name(i) != measured.entry_name(info) for i in infos):
            raise InvalidArgument(
                f"--device {args.devices!r} names devices of several drivers; tune one driver at a time, or "
                "only exchanges between them (--exchanges)"
            )
        if args.forget:
            measured.save(info, {})
            for device in devices:
                forget_host_memory(device)
            return
        check_cache()
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


def check_cache() -> None:
    if not cache_folder.writable():
        raise InvalidArgument("no cache folder to keep the measured table in; set VKBACKEND_CACHE to one")


def tune_exchanges(names: Sequence[str], forget: bool) -> None:
    """Measure all ways to exchange sums between these devices, and store the fastest. A way with a wrong sum
    is shown, but never chosen."""
    out, err = console(), console(stderr=True)
    devices = open_devices(names)
    for device in devices:
        device.close()
    if forget:
        remember_choice(devices, None)
        return
    check_cache()
    rows: list[Measured] = []
    for row in measure_ways(lambda: open_devices(names), len(names)):
        rows.append(row)
        label = f"{row.provider} {row.signal} ahead {depth(row.ahead)}"
        err.print(f"{' '.join(names)} {size(row.nbytes)} {label}: {row.us:.1f} us", markup=False)
    chosen = choice_of(rows)
    cells = [
        (size(row.nbytes), row.provider, row.signal, depth(row.ahead), f"{row.us:.1f}", mark(row, chosen))
        for row in rows
    ]
    titles = ("bytes", "provider", "signal", "ahead", "us", "")
    out.print(table(f"exchanges between {printable(' '.join(names))}", titles, cells))
    if chosen:
        keep(devices, rows, chosen)


def depth(ahead: Ahead) -> str:
    return "all" if ahead is None else str(ahead)


def mark(row: Measured, chosen: Choice | None) -> str:
    if not row.exact:
        return "WRONG"
    if not row.is_sure:
        return f"{row.n_checked} of {SURE_STEPS} steps checked"
    of_size = chosen is not None and row.provider == chosen.way(row.nbytes)
    usual = (row.signal, row.ahead) == (SIGNALS[0], AHEAD)
    if not of_size or not chosen:
        return ""
    kept = (row.signal, row.ahead) == (chosen.signal, chosen.ahead)
    return "chosen" if kept or (usual and row.nbytes != TOKEN_NBYTES) else ""


def host_rows(device: Device) -> list[list[str]]:
    """Return a row of rates for each kind of host memory, and which one is chosen."""
    rows = []
    for name, of in measure_host_memory(device).items():
        kind, *rates = cells(name, of)
        chosen = "chosen" if name == chosen_kind(device) else ""
        rows.append([device.name, str(kind), *(short(float(rate)) for rate in rates), chosen])
    return rows


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["tune", *sys.argv[1:]]))
