"""For each kind of pinned host memory (buffer.py), measures how fast a device's shaders read it, how fast
copies move it to the device, and the speeds of both when they run at once. The rates that users report for
the same bus range from 2 to 26 GB/s, so no rate is assumed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from vkbackend import cache_folder, env
from vkbackend.buffer import Home, View
from vkbackend.errors import OutOfDeviceMemory, Timeout
from vkbackend.meta.known_speed import (
    Speed,
    host_key,
    key_of,
    known_host_kind,
    known_speed,
    numbers,
    remember,
)
from vkbackend.meta.reading import MEASURE_S, Reading, run_times
from vkbackend.meta.speed import _twin, resource_of
from vkbackend.recording import Copy
from vkbackend.runtime import Device

IDLE_S = 1e-4  # seconds between checks whether copies have ended


@dataclass(frozen=True, slots=True)
class HostRates:
    """Bytes per second of shader reads and of copies to device memory, each alone and while the other
    runs."""

    read: float
    copy: float
    read_with_copy: float
    copy_with_read: float

    @property
    def both(self) -> float:
        return self.read_with_copy + self.copy_with_read


def measure_host_memory(device: Device) -> dict[str, HostRates]:
    """Return the rates of each kind of host memory, the default first. A kind is measured once, in about a
    second."""
    rates: dict[str, HostRates] = {}
    for kind in device.host_kinds:
        known = numbers(host_key(device, kind))
        if len(known) != 4:
            twin = _twin(device)
            try:
                twin.host_kind = kind
                known = _rates(twin)
            finally:
                twin.close()
            remember(host_key(device, kind), known)
            env.log(1, f"{device.name}: {kind} host memory, read and copied at {known} bytes/s")
        rates[kind] = HostRates(*known)
    speed = known_speed(device)
    if rates and speed and (best := max(of.read for of in rates.values())) != speed.host:
        remember(f"speed {key_of(device)}", [speed.weights, best])
    return rates


def chosen_kind(device: Device) -> str:
    return known_host_kind(device) or device.host_kinds[0]


def forget_host_memory(device: Device) -> None:
    for kind in device.host_kinds:
        if numbers(host_key(device, kind)):
            remember(host_key(device, kind), [])


def measure_gpus_host_memory(devices: Sequence[Device]) -> None:
    """Measure GPUs before weights are placed in host memory. Without a cache folder, nothing is measured."""
    if cache_folder.writable():
        for device in devices:
            if device.physical and not device.physical.is_cpu:
                with suppress(OutOfDeviceMemory, Timeout):
                    measure_host_memory(device)


def measure_pair(first: Device, second: Device) -> tuple[float, float]:
    """Return the bytes per second at which two devices read host memory at the same time, measured once.
    Devices on one bus read more slowly than one alone."""
    key = f"host pair {key_of(first)}, {key_of(second)}"
    known = numbers(key)
    if len(known) != 2:
        with ExitStack() as stack:
            twins = []
            for device in (first, second):
                twins.append(_twin(device))
                stack.callback(twins[-1].close)
            readings = [stack.enter_context(Reading(twin, Home.HOST)) for twin in twins]
            known = _together(twins, readings)
        remember(key, known)
    return known[0], known[1]


def shared_bus(devices: Sequence[Device], speeds: Sequence[Speed], reads: Sequence[bool]) -> list[Speed]:
    """For each pair of devices that both read host memory, lower their host rates to the measured rates of
    the pair. Devices of one resource already share its time, so they are not paired."""
    part = [1.0] * len(devices)
    for a, first in enumerate(devices):
        for b, second in enumerate(devices[:a]):
            alike = resource_of(first) == resource_of(second)
            if not (reads[a] and reads[b]) or first.node or second.node or alike:
                continue
            for d, rate in zip((b, a), measure_pair(second, first), strict=True):
                part[d] = min(part[d], rate / speeds[d].host)
    return [Speed(of.weights, of.host * min(1.0, part[d])) for d, of in enumerate(speeds)]


def _rates(device: Device) -> list[float]:
    """Return the values of HostRates in order."""
    with Reading(device, Home.HOST) as reading:
        targets = [device.buffer(w.nbytes, Home.WEIGHTS, "measured copy") for w in reading.matrices]
        words = [(w.nbytes // 4,) for w in reading.matrices]
        copies = [
            Copy(View(w, 0, shape, "u32"), View(to, 0, shape, "u32"), "measured copy")
            for w, to, shape in zip(reading.matrices, targets, words, strict=True)
        ]
        try:
            read = reading.rate()
            copy = reading.nbytes / statistics.median(run_times(lambda: _copy(device, copies)))
            read_with, copy_with = _both(device, reading, copies)
        finally:
            for target in targets:
                device.free(target)
    return [read, copy, read_with or read, copy_with or copy]


def _copy(device: Device, copies: Sequence[Copy]) -> None:
    device.begin_copies(copies)
    _await_copies(device)


def _await_copies(device: Device) -> None:
    deadline = time.monotonic() + env.timeout_s()
    while not device.copies_ended():
        if time.monotonic() > deadline:
            raise Timeout(f"{device.name}: copies from host memory did not end in {env.timeout_s()} s")
        time.sleep(IDLE_S)


def _both(device: Device, reading: Reading, copies: Sequence[Copy]) -> tuple[float, float]:
    """Return the rates of reads and of copies while both run, or zeros if the host waits for copies. Copies
    wait for reads that were submitted before them, as an expert cache's copies wait for steps."""
    n_read = n_copied = running = 0
    began = time.perf_counter()
    copying, deadline = False, time.monotonic() + env.timeout_s()
    while True:
        more = time.perf_counter() - began < MEASURE_S
        if not running and more:
            running = _start(device, reading)
        if not copying and more:
            device.begin_copies(copies)
            if device.copies_ended() and not n_copied:
                _await_reads(device, running)
                return 0.0, 0.0
            copying = True
        if running and device.queue.completed() >= running:
            n_read, running = n_read + reading.nbytes, 0
        if copying and device.copies_ended():
            n_copied, copying = n_copied + reading.nbytes, False
        if not (running or copying or more):
            break
        if time.monotonic() > deadline:
            raise Timeout(f"{device.name}: reads and copies of host memory did not end")
        time.sleep(IDLE_S)
    seconds = time.perf_counter() - began
    return n_read / seconds, n_copied / seconds


def _await_reads(device: Device, number: int) -> None:
    if not device.queue.wait(number, env.timeout_s()):
        raise Timeout(f"{device.name}: reads of host memory did not end in {env.timeout_s()} s")


def _together(devices: Sequence[Device], readings: Sequence[Reading]) -> list[float]:
    """Return each device's rate while all devices read. A device that ends early starts again, until every
    device has read for MEASURE_S."""
    for reading in readings:
        reading.run()
    ends = [0.0] * len(readings)
    counts = [0] * len(readings)
    began = time.perf_counter()
    numbers_of = [_start(device, reading) for device, reading in zip(devices, readings, strict=True)]
    while any(numbers_of):
        for d, device in enumerate(devices):
            if numbers_of[d] and device.queue.completed() >= numbers_of[d]:
                counts[d] += 1
                ends[d] = time.perf_counter() - began
                # All devices stop together, because a device that read alone would be faster.
                numbers_of[d] = _start(device, readings[d]) if min(ends) < MEASURE_S else 0
        if time.perf_counter() - began > env.timeout_s():
            raise Timeout(f"{devices[0].name} and {devices[1].name}: reads of host memory did not end")
        time.sleep(IDLE_S)
    return [reading.nbytes * count / end for reading, count, end in zip(readings, counts, ends, strict=True)]


def _start(device: Device, reading: Reading) -> int:
    device.queue.submit(reading.executable, 0, reading.executable.n_segments)
    device.queue.allow(device.queue.submitted)
    return device.queue.submitted
