"""Measure how fast devices read weights and reduce, on separate logical devices. Each device and driver is
measured once (known_speed.py)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import ExitStack, suppress

from vkbackend import cache_folder, env
from vkbackend.buffer import Home, View
from vkbackend.errors import OutOfDeviceMemory, Timeout
from vkbackend.figures import short
from vkbackend.meta.bench import time_reduce
from vkbackend.meta.elsewhere import Elsewhere
from vkbackend.meta.known_speed import (
    Speed,
    key_of,
    known_host_kind,
    known_speed,
    numbers,
    reduce_key,
    remember,
)
from vkbackend.meta.reading import (
    GPU_MATRICES,
    GPU_NBYTES,
    SOFTWARE_NBYTES,
    Reading,
    measured_nbytes,
    seconds_per_round,
)
from vkbackend.ops import Recorder
from vkbackend.recording import Recording
from vkbackend.runtime import Device
from vkbackend.twins.device import NumpyDevice


def class_of(device: Device) -> Hashable:
    """Return a key. Devices with equal keys are of the same kind and are assumed to be equally fast."""
    info = device.physical
    return (info.vendor, info.name, info.driver, info.driver_version) if info else type(device).__name__


def resource_of(device: Device) -> Hashable:
    """Return the resource that logical devices share, a physical device or a node's processor."""
    info = device.physical
    return info.uuid if info and not info.is_cpu else f"{device.node} cpu".strip()


# ---- measuring ----


def measure_speed(device: Device) -> Speed:
    """Return the device's speed. The first call for a device takes about a second."""
    if isinstance(device, Elsewhere):
        assert device.card.speed, f"the node of {device.name} sent no speed"
        return Speed(*device.card.speed)
    if known := known_speed(device):
        return known
    twin = _twin(device)
    try:
        speed = Speed(_read_rate(twin, Home.WEIGHTS), _read_rate(twin, Home.HOST))
    finally:
        twin.close()
    env.log(
        1, f"{device.name}: measured {short(speed.weights / 1e9)} GB/s, host memory {short(speed.host / 1e9)}"
    )
    remember(f"speed {key_of(device)}", [speed.weights, speed.host])
    return speed


def measure_gpus(devices: Sequence[Device]) -> None:
    """Measure GPUs of unknown speed before loading. Otherwise their submissions are sized for the slowest
    GPU. Without a cache folder nothing is measured. The speed of a full or hanging GPU stays unknown."""
    gpus = [device for device in devices if device.physical and not device.physical.is_cpu]
    if gpus and cache_folder.writable():
        for device in gpus:
            with suppress(OutOfDeviceMemory, Timeout):
                measure_speed(device)


def measure_copy(device: Device) -> float:
    """Return the bytes per second of fast copies within a device, measured once. Both read and written bytes
    count."""
    key = f"copy {key_of(device)}"
    known = numbers(key)
    if len(known) != 1:
        twin = _twin(device)
        try:
            known = [_copy_rate(twin)]
        finally:
            twin.close()
        env.log(1, f"{device.name}: measured {short(known[0] / 1e9)} GB/s for copies")
        remember(key, known)
    return known[0]


def measure_reduce(devices: Sequence[Device], nbytes: int) -> float:
    """Return the seconds of an all-reduce of `nbytes`, rounded up to a power of two. The time is measured
    once, and is 0 for one device. The slowest exchange with other nodes is added."""
    if len(devices) < 2:
        return 0.0
    far = [d.exchange.seconds(nbytes) for d in devices if isinstance(d, Elsewhere) and d.exchange]
    if far:
        return max(far) + measure_reduce([d for d in devices if not d.node], nbytes)
    nbytes = 1 << max(12, (nbytes - 1).bit_length())
    key = reduce_key(devices, nbytes)
    known = numbers(key)
    if len(known) != 1:
        with ExitStack() as stack:
            twins = []
            for device in devices:
                twins.append(_twin(device))
                stack.callback(twins[-1].close)
            known = [time_reduce(twins, nbytes).median]
        names = ", ".join(device.name for device in devices)
        env.log(1, f"{names}: measured {1e6 * known[0]:.0f} us per reduce of {nbytes} bytes")
        remember(key, known)
    return known[0]


def _twin(device: Device) -> Device:
    name = f"{device.name} (measured)"
    if not device.physical:
        return NumpyDevice(name)
    twin = type(device)(device.physical, name)
    twin.limits, twin.host_kind = device.limits, known_host_kind(device)
    return twin


def _read_rate(device: Device, home: Home) -> float:
    with Reading(device, home) as reading:
        return reading.rate()


def _copy_rate(device: Device) -> float:
    n = measured_nbytes(device, GPU_NBYTES, 8 * SOFTWARE_NBYTES) // 2 // GPU_MATRICES // 4
    views = [View(device.buffer(4 * n, Home.WEIGHTS, "copied"), 0, (n,)) for _ in range(2 * GPU_MATRICES)]

    def by_command(recording: Recording) -> None:
        for source, target in zip(views[::2], views[1::2], strict=True):
            recording.copy(source, target, "copy")

    def by_shader(recording: Recording) -> None:
        on = Recorder(recording, device.limits)
        for source, target in zip(views[::2], views[1::2], strict=True):
            on.scale(source, target, c=1.0)

    # An H100 copies at 813 GB/s by command, while shaders read weights at 1,440 GB/s.
    ways = [by_command] if device.limits.is_cpu else [by_command, by_shader]
    seconds = min(seconds_per_round(device, way) for way in ways)
    for view in views:
        device.free(view.buffer)  # type: ignore[arg-type]
    return 8.0 * n * GPU_MATRICES / seconds
