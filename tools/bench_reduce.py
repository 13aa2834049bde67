"""`vkbackend bench-reduce`: time the all-reduces of tensor parallelism between devices.

Times steps of many all-reduces on the first 2, 3, ... devices of the list. The first columns are devices,
provider, signal (how host and devices signal each other), and wire (format of a partial sum). Then come ahead
(exchanges submitted before they may run) and the bytes of the f32 message. Results are us per all-reduce
(median, minimum, maximum) and GB/s of messages at the median. With several nodes, the network's part of the
time follows. docs/multi-gpu.md describes the providers and signals. The exit code is 1 after a wrong sum.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from vkbackend.checks import whole_number
from vkbackend.errors import InvalidArgument, OutOfDeviceMemory, PlanError, UnsupportedFeature
from vkbackend.meta.bench import time_reduce
from vkbackend.meta.known_ways import ONE_CALL
from vkbackend.meta.options import ReduceOptions, ahead_depth
from vkbackend.meta.reduce import WIRES as REDUCE_TYPES
from vkbackend.meta.ways import PROVIDERS, WAYS, can_signal
from vkbackend.models.arguments import device_list
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.models.hosts.survey import time_reduces
from vkbackend.runtime import SIGNALS
from vkbackend.tools.console import console, printable, size, write_json, write_md
from vkbackend.tools.flags import runner
from vkbackend.tools.measure.reduce_sizes import AHEAD, SIZES, parse_size

WIRES = tuple(wire for wire in REDUCE_TYPES if wire != "auto")
NETWORKED = tuple(way.name for way in WAYS if way.networked)
COLUMNS = (
    "devices",
    "provider",
    "signal",
    "wire",
    "ahead",
    "bytes",
    "us",
    "us min",
    "us max",
    "GB/s",
    "sums",
)


@dataclass(frozen=True, slots=True)
class Row:
    """Times are in microseconds."""

    devices: tuple[str, ...]
    provider: str
    signal: str
    wire: str
    ahead: str
    nbytes: int
    us: float
    us_min: float
    us_max: float
    exact: bool
    us_network: float | None = None  # microseconds of the network in `us`
    n_wrong: int = 0  # steps with wrong sums
    n_checked: int = 0

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.us / 1e3

    def cells(self) -> tuple[str, ...]:
        times = (f"{t:.1f}" for t in (self.us, self.us_min, self.us_max))
        # On another node, sums may be wrong that were exact here.
        wrong = f"{self.n_wrong} of {self.n_checked} WRONG" if self.n_wrong else "WRONG"
        sums = "exact" if self.exact else wrong
        devices = " ".join(map(printable, self.devices))
        how = (self.provider, self.signal, self.wire, self.ahead, str(self.nbytes))
        network = () if self.us_network is None else (f"{self.us_network:.1f}",)
        return (devices, *how, *times, f"{self.gb_per_s:.3f}", sums, *network)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "-dev",
        "--device",
        dest="devices",
        metavar="LIST",
        default="0,0",
        help="two or more devices, comma-separated; one may be given several times (default: 0,0)",
    )
    add("--sizes", metavar="LIST", default=SIZES, help=f"message sizes in bytes, K or M (default: {SIZES})")
    add(
        "--providers",
        metavar="LIST",
        help=f"where partial sums are added: {','.join(PROVIDERS)} (default: all; on several machines "
        f"{','.join(NETWORKED)}, the only ones there)",
    )
    add(
        "--signals",
        metavar="LIST",
        default=SIGNALS[0],
        help=f"how host and devices signal each other: {','.join(SIGNALS)} (default: {SIGNALS[0]})",
    )
    add(
        "--wires",
        metavar="LIST",
        default=",".join(WIRES),
        help=f"formats of partial sums (default: {','.join(WIRES)})",
    )
    add(
        "--ahead",
        metavar="LIST",
        default=AHEAD,
        help=f"exchanges submitted before they may run: numbers, all, or {ONE_CALL} (all in one call of the "
        f"driver) (default: {AHEAD})",
    )
    add("-r", "--repetitions", type=int, default=5, metavar="N",
        help="timed steps for each combination, 1..1000 (default: 5)")  # fmt: skip
    add("-o", "--output", choices=("md", "csv", "json"), default="md", help="output format (default: md)")


def words(name: str, text: str, known: Sequence[str] = ()) -> list[str]:
    """Split a comma-separated list. Each word must be in `known`, unless `known` is empty."""
    items = [word.strip() for word in text.split(",") if word.strip()]
    for word in items:
        if known and word not in known:
            raise InvalidArgument(f"{name} {word!r} is unknown; there are: {', '.join(known)}")
    if not items:
        raise InvalidArgument(f"{name} {text!r} is an empty list")
    return items


def combinations(args: argparse.Namespace) -> list[tuple[tuple[str, ...], int, str, str, str, str]]:
    """Return (devices, bytes, provider, signal, wire, ahead) of every row. Raises InvalidArgument."""
    devices = runner.places if runner.group else device_list("devices", args.devices) or ()
    if len(devices) < 2:
        raise InvalidArgument(
            f"one device ({', '.join(devices)}) has nothing to reduce; give two or more, as in -dev 0,0"
        )
    whole_number("--repetitions", args.repetitions, 1, 1000)
    sizes = [parse_size(text) for text in words("--sizes", args.sizes)]
    aheads = words("--ahead", args.ahead)
    for text in aheads:
        ahead_depth("--ahead", text)
    if runner.group and ONE_CALL in aheads:
        raise InvalidArgument(f"--ahead {ONE_CALL} needs one machine; there are {len(runner.places)} places")
    known = NETWORKED if runner.group else PROVIDERS
    providers = words("--providers", ",".join(known) if args.providers is None else args.providers, known)
    return [
        (devices[:n], nbytes, provider, signal, wire, ahead)
        for n in range(2, len(devices) + 1)
        for provider in providers
        for signal in words("--signals", args.signals, SIGNALS)
        for wire in words("--wires", args.wires, WIRES)
        for nbytes in sizes
        for ahead in aheads
        if not runner.group or can_signal(provider, signal)  # a group leaves no row out later
    ]


def measure(args: argparse.Namespace) -> Iterator[Row]:
    err = console(stderr=True)
    jobs = combinations(args)
    for i, (devices, nbytes, provider, signal, wire, ahead) in enumerate(jobs):
        label = f"{' '.join(devices)} {provider} {signal} {wire} ahead {ahead} {size(nbytes)}"
        err.print(f"[{i + 1}/{len(jobs)}] {label}", markup=False)
        depth = ahead_depth("--ahead", ahead)
        try:
            how = ReduceOptions(
                reduce_type=wire, reduce_provider=provider, submit_ahead=depth, reduce_signal=signal
            )
            if runner.group:
                result = time_reduces(runner.group, devices, nbytes, how, args.repetitions)
            else:
                result = time_reduce(open_devices(devices), nbytes, how, repeats=args.repetitions)
        except (UnsupportedFeature, OutOfDeviceMemory, PlanError) as error:
            if runner.group:
                raise  # the other nodes already wait in this exchange
            err.print(f"  left out: {printable(str(error))}", markup=False)
            continue
        us = [1e6 * s for s in result.seconds]
        how_words = provider, signal, wire, ahead
        row = Row(devices, *how_words, nbytes, 1e6 * result.median, min(us), max(us), result.exact)
        row = replace(row, n_wrong=result.n_wrong, n_checked=result.n_checked)
        yield replace(row, us_network=1e6 * result.network) if runner.group else row


def run(args: argparse.Namespace) -> int:
    rows: list[Row] = []
    write = csv.writer(sys.stdout).writerow if args.output == "csv" else write_md
    for row in measure(args):
        if args.output != "json" and not rows:
            lines = ["---", "---", "---", "---", "---:", "---:", "---:", "---:", "---:", "---:", "---"]
            write((*COLUMNS, "us network") if runner.group else COLUMNS)
            if args.output == "md":
                write([*lines, "---:"] if runner.group else lines)
        rows.append(row)
        if args.output != "json":
            write(row.cells())
            sys.stdout.flush()
    if args.output == "json":
        write_json([asdict(row) | {"gb_per_s": row.gb_per_s} for row in rows], indent=1)
    if not rows:
        raise UnsupportedFeature("the devices support none of these all-reduces; see the reasons above")
    return 0 if all(row.exact for row in rows) else 1


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["bench-reduce", *sys.argv[1:]]))
