"""Count what one exchange costs the host: calls of Vulkan functions and processor time, by signal and by
exchanges submitted ahead.

The devices' queues count the calls while a chain of sums runs, whose result is checked bit by bit. With
--strace, each combination runs in a separate process under strace. strace counts the system calls of all
threads, including the driver's threads.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vkbackend.meta.bench import chain_length, time_reduce
from vkbackend.meta.mesh import Mesh
from vkbackend.meta.options import ReduceOptions, ahead_depth
from vkbackend.meta.ways import PROVIDERS
from vkbackend.models.arguments import device_list
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.runtime import SIGNALS, Device
from vkbackend.tools.console import write_md
from vkbackend.vulkan.signals import Events

CALLS = {"_submit": "submit", "_signal": "signal", "_counter": "read value", "_wait": "wait"}
HEAD = (
    *("devices", "provider", "signal", "ahead", "submit", "signal calls", "read value", "wait", "set event"),
    *("reset event", "host us of CPU", "us", "sums"),
)
LENGTH, REPEATS = 32, 20  # number of exchanges per step, and number of timed steps


class Counted:
    """Counts the calls of a step while `counts` is set."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.counts: Counter[str] | None = None
        for device in devices:
            for attribute, name in CALLS.items():
                if hasattr(device.queue, attribute):
                    setattr(device.queue, attribute, self._counted(getattr(device.queue, attribute), name))

    def _counted(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            if self.counts is not None:
                self.counts[name] += 1
            return call(*args)

        return counted


def measured(
    names: Sequence[str], nbytes: int, how: ReduceOptions
) -> tuple[Counter[str], float, float, bool]:
    """Return the calls, the seconds of this thread's processor time, and the seconds of wall time. All three
    are per exchange. The last value says whether all sums were right."""
    devices = open_devices(names)
    counted = Counted(devices)
    calls: Counter[str] = Counter()
    spent: list[float] = []
    run, set_, reset = Mesh.run, Events.set, Events.reset
    patched: Any = Mesh
    events_class: Any = Events

    def timed(mesh: Mesh, step: Any) -> None:
        if not spent:  # the first step warms up
            spent.append(0.0)
            return run(mesh, step)
        counted.counts, began = calls, time.thread_time()
        run(mesh, step)
        spent.append(time.thread_time() - began)
        counted.counts = None
        return None

    def counting(call: Callable[[Events, int], None], name: str) -> Callable[[Events, int], None]:
        def wrapped(events: Events, segment: int) -> None:
            calls[name] += counted.counts is not None
            call(events, segment)

        return wrapped

    try:
        patched.run = timed
        events_class.set = counting(set_, "set event")
        events_class.reset = counting(reset, "reset event")
        result = time_reduce(devices, nbytes, how, repeats=REPEATS, length=LENGTH)
    finally:
        patched.run, events_class.set, events_class.reset = run, set_, reset
    n = LENGTH * len(result.seconds)
    return Counter({k: v / n for k, v in calls.items()}), sum(spent) / n, result.median, result.exact


def system_calls(args: argparse.Namespace, provider: str, signal: str, ahead: str) -> float:
    """Return the system calls per exchange, from the difference of runs with 1 and REPEATS + 1 steps."""
    counts = []
    for repeats in (1, REPEATS + 1):
        with tempfile.NamedTemporaryFile(suffix=".strace") as file:
            flags = [
                "-dev",
                args.devices,
                "--sizes",
                str(args.nbytes),
                "--providers",
                provider,
                "--wires",
                "f32",
            ]
            flags += ["--ahead", ahead, "--signals", signal, "-r", str(repeats), "-o", "json"]
            command = ["strace", "-f", "-c", "-o", file.name, sys.executable, "-m", "vkbackend.tools.cli"]
            subprocess.run([*command, "bench-reduce", *flags], check=True, capture_output=True)
            counts.append(total_of(Path(file.name).read_text(encoding="utf-8")))
    return (counts[1] - counts[0]) / REPEATS / chain_length(args.nbytes)


def total_of(summary: str) -> int:
    """Return the calls of strace's summary, whose last line is its total."""
    fields = summary.strip().splitlines()[-1].split()
    return int(fields[3])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("-dev", dest="devices", default="0,0", help="devices (default: 0,0)")
    add("--nbytes", type=int, default=16_384, help="bytes of a sum (default: 16384)")
    add("--providers", default="pages", help=f"of {','.join(PROVIDERS)} (default: pages)")
    add("--ahead", default="0,2,all", help="submissions ahead (default: 0,2,all)")
    add("--strace", action="store_true", help="count system calls, too")
    args = parser.parse_args()
    names = device_list("devices", args.devices) or ()
    head = (*HEAD, "system calls") if args.strace else HEAD
    write_md(head)
    write_md(["---"] * len(head))
    for provider in args.providers.split(","):
        for signal in SIGNALS:
            for ahead in args.ahead.split(","):
                how = ReduceOptions(
                    reduce_type="f32",
                    reduce_provider=provider,
                    reduce_signal=signal,
                    submit_ahead=ahead_depth("--ahead", ahead),
                )
                calls, cpu_s, median, exact = measured(names, args.nbytes, how)
                columns = ("submit", "signal", "read value", "wait", "set event", "reset event")
                row = [args.devices, provider, signal, ahead, *(f"{calls[name]:.2f}" for name in columns)]
                row += [f"{1e6 * cpu_s:.1f}", f"{1e6 * median:.0f}", "exact" if exact else "WRONG"]
                row += [f"{system_calls(args, provider, signal, ahead):.1f}"] if args.strace else []
                write_md(row)
                sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
