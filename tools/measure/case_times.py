"""Times an op case on a device."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from vkbackend.ops import Recorder
from vkbackend.recording import Dispatch, Recording, cut_long, derive_barriers
from vkbackend.runtime import Device
from vkbackend.tools.console import printable
from vkbackend.tools.op_cases.setup import Case, Placed


@dataclass(frozen=True, slots=True)
class Row:
    """A case's times in microseconds, and the bytes and operations of one run."""

    device: str
    case: str
    runs: str
    us_min: float
    us_median: float
    us_cpu: float | None  # software devices only
    nbytes: int
    flops: int

    def cells(self) -> tuple[str, ...]:
        rates = (f"{self.nbytes / self.us_min / 1e3:.3f}", f"{self.flops / self.us_min / 1e3:.3f}")
        times = (f"{self.us_min:.1f}", f"{self.us_median:.1f}", f"{self.us_cpu:.1f}" if self.us_cpu else "")
        return (printable(self.device), self.case, self.runs, *times, *rates)


class Chain:
    """Runs of a case, which alternate between copies of its arrays. The copies together exceed
    `cold_nbytes`."""

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
        """Return the seconds of every run. Without timestamps, return the mean seconds per run of each
        submission."""
        device, timed = self.device, has_clock(self.device)
        recording = self.recording(length)
        build: Any = device.build  # Only Vulkan devices have `timed`.
        executable = build(recording, timed=True) if timed else build(recording)
        out: list[float] = []
        self.cpu_seconds = math.inf
        try:
            for i in range(repeats + 1):  # The first run is a warm-up.
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
    """Return whether the device can write a timestamp per dispatch without a stall."""
    info = device.physical
    return info is not None and not info.is_cpu and bool(info.limits["timestamp_valid_bits"])


def time_case(device: Device, case: Case, repeats: int, ms: float, cold_nbytes: int = 0) -> Row:
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
