"""Count what one exchange costs: calls of Vulkan functions, bytes and processor time, by way and by exchanges
submitted ahead.

The devices' queues count the calls while a chain of sums runs, whose result is checked bit by bit. The bytes
come from the recorded step (exchange_traffic.py). On a busy machine, compare processor times. With --repeat,
all ways run in turns, and the table shows the fastest round of each. With --strace, each combination runs in
a separate process under strace. strace counts the system calls of all threads, including the driver's
threads. Events are left out for providers that do not allow them, and for one-call.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from vkbackend.meta.bench import chain_length, time_reduce
from vkbackend.meta.known_ways import ONE_CALL
from vkbackend.meta.mesh import Mesh
from vkbackend.meta.options import ReduceOptions, ahead_depth
from vkbackend.meta.ways import HOST_WRITTEN, PROVIDERS, can_signal
from vkbackend.models.arguments import device_list
from vkbackend.models.engine.runner.open_devices import open_devices
from vkbackend.runtime import SIGNALS, Device
from vkbackend.tools.console import write_md
from vkbackend.tools.measure.reduce_sizes import parse_size
from vkbackend.tools.studies.exchange_traffic import traffic
from vkbackend.vulkan.recorded_copies import VulkanCopies
from vkbackend.vulkan.signals import Events

CALLS = {"_submit": "submit", "_signal": "signal", "_counter": "read value", "_wait": "wait"}
HEAD = tuple(
    "devices,bytes,provider,signal,ahead,submit,signal calls,read value,wait,set event,reset event,"
    "device waits,bytes read,bytes written,host bytes,host us of CPU,all us of CPU,us,sums".split(",")
)
REPEATS = 20  # number of timed steps


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
    """Return the calls (and the processor time of all threads, also the drivers'), the seconds of this
    thread's processor time, and the seconds of wall time. All are per exchange. The last value says whether
    all sums were right."""
    devices = open_devices(names)
    counted = Counted(devices)
    calls: Counter[str] = Counter()
    moved: Counter[str] = Counter()  # of one step
    spent: list[float] = []
    run = Mesh.run
    patched: Any = Mesh
    # Copies of the provider `copies` submit and wait, too.
    others: list[tuple[Any, str, str]] = [
        (Events, "set", "set event"),
        (Events, "reset", "reset event"),
        (VulkanCopies, "_submit", "submit"),
        (VulkanCopies, "_ended", "wait"),
    ]
    kept = [getattr(cls, name) for cls, name, _ in others]

    def timed(mesh: Mesh, step: Any) -> None:
        if not spent:  # the first step warms up
            spent.append(0.0)
            moved.update(traffic(mesh, step))
            moved["device waits"] = sum(executable.n_segments - 1 for executable in step.executables)
            return run(mesh, step)
        counted.counts, began, began_all = calls, time.thread_time(), time.process_time()
        run(mesh, step)
        spent.append(time.thread_time() - began)
        calls["all us of CPU"] += round(1e6 * (time.process_time() - began_all))
        counted.counts = None
        return None

    def counting(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            calls[name] += counted.counts is not None
            return call(*args)

        return wrapped

    length = chain_length(nbytes)
    try:
        patched.run = timed
        for (cls, name, counted_as), call in zip(others, kept, strict=True):
            setattr(cls, name, counting(call, counted_as))
        result = time_reduce(devices, nbytes, how, repeats=REPEATS)
    finally:
        patched.run = run
        for (cls, name, _), call in zip(others, kept, strict=True):
            setattr(cls, name, call)
    n = length * len(result.seconds)
    each = {name: count / n for name, count in calls.items()}
    each |= {name: count / length for name, count in moved.items()}
    return Counter(each), sum(spent) / n, result.median, result.exact


def system_calls(devices: str, nbytes: int, provider: str, signal: str, ahead: str) -> float:
    """Return the system calls per exchange, from the difference of runs with 1 and REPEATS + 1 steps."""
    counts = []
    for repeats in (1, REPEATS + 1):
        with tempfile.NamedTemporaryFile(suffix=".strace") as file:
            flags = ["-dev", devices, "--sizes", str(nbytes), "--providers", provider]
            flags += ["--ahead", ahead, "--signals", signal, "--steps", str(repeats)]
            command = ["strace", "-f", "-c", "-o", file.name, sys.executable, "-m", __spec__.name]
            subprocess.run([*command, *flags], check=True, capture_output=True)
            counts.append(total_of(Path(file.name).read_text(encoding="utf-8")))
    return (counts[1] - counts[0]) / REPEATS / chain_length(nbytes)


def run_steps(names: Sequence[str], nbytes: int, how: ReduceOptions, n_steps: int) -> None:
    """Run a warm-up step and `n_steps` steps, however long they take."""
    devices = open_devices(names)
    result = time_reduce(devices, nbytes, how, repeats=n_steps, check_all=False, limit_s=math.inf)
    assert len(result.seconds) == n_steps and result.exact


def total_of(summary: str) -> int:
    """Return the calls of strace's summary, whose last line is its total."""
    fields = summary.strip().splitlines()[-1].split()
    return int(fields[3])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("-dev", dest="devices", default="0,0", help="devices (default: 0,0)")
    add("--sizes", default="16K", help="bytes of a sum, K or M (default: 16K)")
    add("--providers", default="pages", help=f"of {','.join(PROVIDERS)} (default: pages)")
    add("--ahead", default="0,2,all", help="submissions ahead, also one-call (default: 0,2,all)")
    add("--signals", default=",".join(SIGNALS), help=f"of {','.join(SIGNALS)} (default: all)")
    add("--repeat", type=int, default=1, metavar="N", help="rounds of all ways (default: 1)")
    add("--strace", action="store_true", help="count system calls, too")
    add("--steps", type=int, help=argparse.SUPPRESS)  # run so many steps and print nothing
    args = parser.parse_args()
    names = device_list("devices", args.devices) or ()
    if args.steps:
        how = options_of(args.providers, args.signals, args.ahead)
        run_steps(names, parse_size(args.sizes), how, args.steps)
        return 0
    head = (*HEAD, "system calls") if args.strace else HEAD
    write_md(head)
    write_md(["---"] * len(head))
    sizes = [parse_size(text) for text in args.sizes.split(",")]
    ways = [
        way
        for way in product(sizes, args.providers.split(","), args.signals.split(","), args.ahead.split(","))
        if can_signal(*way[1:3]) and not (way[3] == ONE_CALL and "event" in way[2])
    ]
    if not ways:
        parser.error(f"nothing is left to count; events need --providers {' or '.join(HOST_WRITTEN)}")
    results: dict[tuple[int, str, str, str], list[tuple[Counter[str], float, float, bool]]] = {}
    for _ in range(args.repeat):
        for way in ways:
            results.setdefault(way, []).append(measured(names, way[0], options_of(*way[1:])))
    for way, rounds in results.items():
        calls, cpu_s, median, _ = min(rounds, key=lambda result: result[2])
        exact = all(result[3] for result in rounds)
        columns = ("submit", "signal", "read value", "wait", "set event", "reset event", "device waits")
        row = [args.devices, *map(str, way), *(f"{calls[name]:.2f}" for name in columns)]
        row += [f"{calls[name]:.0f}" for name in ("read", "written")]
        row += [f"{calls['host read'] + calls['host written']:.0f}"]
        row += [
            f"{1e6 * cpu_s:.1f}",
            f"{calls['all us of CPU']:.0f}",
            f"{1e6 * median:.0f}",
            "exact" if exact else "WRONG",
        ]
        row += [f"{system_calls(args.devices, *way):.1f}"] if args.strace else []
        write_md(row)
        sys.stdout.flush()
    return 0


def options_of(provider: str, signal: str, ahead: str) -> ReduceOptions:
    return ReduceOptions(
        reduce_type="f32",
        reduce_provider=provider,
        reduce_signal=signal,
        submit_ahead=ahead_depth("--ahead", ahead),
    )


if __name__ == "__main__":
    sys.exit(main())
