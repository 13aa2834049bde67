"""Measure how fast devices read weights and reduce, on separate logical devices. Each device and driver is
measured once (known_speed.py)."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from contextlib import ExitStack, suppress

import numpy as np

from vkbackend import cache_folder, env, ops
from vkbackend.buffer import Home, View
from vkbackend.errors import OutOfDeviceMemory, Timeout
from vkbackend.formats import row_nbytes
from vkbackend.meta.bench import time_reduce
from vkbackend.meta.elsewhere import Elsewhere
from vkbackend.meta.known_speed import DTYPE, Speed, key_of, known_speed, numbers, remember
from vkbackend.recording import Recording, derive_barriers
from vkbackend.runtime import Device
from vkbackend.twins.device import NumpyDevice

WIDTH = 4096
GPU_NBYTES, GPU_MATRICES = 256 << 20, 8  # Several times any cache.
# Arithmetic limits software devices, so fewer bytes suffice.
SOFTWARE_NBYTES, SOFTWARE_MATRICES = 8 << 20, 4
HEAP_SHARE = 8  # Matrices take at most 1 / HEAP_SHARE of a device's memory.
MEASURE_S = 0.3  # Seconds per kind of memory, after a warm-up.
MIN_RUNS, MAX_RUNS = 2, 50


def class_of(device: Device) -> Hashable:
    """Return a key that is equal for devices of the same kind, which are assumed to be equally fast."""
    info = device.physical
    return (info.vendor, info.name, info.driver, info.driver_version) if info else type(device).__name__


def resource_of(device: Device) -> Hashable:
    """Return the resource that logical devices share, a physical device or a node's processor."""
    info = device.physical
    return info.uuid if info and not info.is_cpu else f"{device.node} cpu".strip()


# ---- measuring ----


def measure_speed(device: Device) -> Speed:
    """Return the device's speed. The first call takes about a second."""
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
    env.log(1, f"{device.name}: measured {speed.weights / 1e9:.3g} GB/s, host memory {speed.host / 1e9:.3g}")
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
    """Return the bytes per second, read plus written, of copies within a device, measured once."""
    key = f"copy {key_of(device)}"
    known = numbers(key)
    if len(known) != 1:
        twin = _twin(device)
        try:
            known = [_copy_rate(twin)]
        finally:
            twin.close()
        env.log(1, f"{device.name}: measured {known[0] / 1e9:.3g} GB/s for copies")
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
    key = f"reduce {nbytes} {', '.join(map(key_of, devices))}"
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
    twin.limits = device.limits
    return twin


def _read_rate(device: Device, home: Home) -> float:
    """Return the bytes per second at which matrices that exceed every cache are multiplied by a row."""
    info = device.physical
    total, count = (
        (GPU_NBYTES, GPU_MATRICES) if info and not info.is_cpu else (SOFTWARE_NBYTES, SOFTWARE_MATRICES)
    )
    if info:
        total = min(total, max(heap.nbytes for heap in info.heaps) // HEAP_SHARE)
    row = row_nbytes(DTYPE, WIDTH)
    shape = max(1, total // count // row), WIDTH
    # Bytes in this range produce finite and normal scales.
    stored = np.random.default_rng(0).integers(0x20, 0x30, shape[0] * row, np.uint8)
    x = View(device.buffer(4 * WIDTH, Home.SCRATCH, "x"), 0, (1, WIDTH))
    device.write(x, np.ones(WIDTH, np.float32))
    on, buffers = ops.Recorder(Recording("weight reading"), device.limits), [x.buffer]
    operand = x
    if (dtype := ops.operand_type(device.limits, 1, DTYPE)) != "f32":
        operand = View(device.buffer(row_nbytes(dtype, WIDTH), Home.SCRATCH, dtype), 0, (1, WIDTH), dtype)
        on.convert(x, operand)
        buffers.append(operand.buffer)
    for _ in range(count):
        w = View(device.buffer(stored.nbytes, home, "w"), 0, shape, DTYPE)
        y = View(device.buffer(4 * shape[0], Home.SCRATCH, "y"), 0, (1, shape[0]))
        device.write(w, stored)
        on.mat(w, operand, y)
        buffers += [w.buffer, y.buffer]
    seconds = _run_times(device, on.recording)
    for buffer in buffers:
        device.free(buffer)  # type: ignore[arg-type]
    return count * stored.nbytes / float(np.median(seconds))


def _copy_rate(device: Device) -> float:
    info = device.physical
    total = GPU_NBYTES if info and not info.is_cpu else 8 * SOFTWARE_NBYTES
    if info:
        total = min(total, max(heap.nbytes for heap in info.heaps) // HEAP_SHARE)
    n = total // 2 // GPU_MATRICES // 4
    views = [View(device.buffer(4 * n, Home.WEIGHTS, "copied"), 0, (n,)) for _ in range(2 * GPU_MATRICES)]
    recording = Recording("copying")
    for source, target in zip(views[::2], views[1::2], strict=True):
        recording.copy(source, target, "copy")
    seconds = _run_times(device, recording)
    for view in views:
        device.free(view.buffer)  # type: ignore[arg-type]
    return 8.0 * n * GPU_MATRICES / float(np.median(seconds))


def _run_times(device: Device, recording: Recording) -> list[float]:
    executable = device.build(derive_barriers(recording))
    seconds: list[float] = []
    try:
        while len(seconds) < 1 + MIN_RUNS or (sum(seconds[1:]) < MEASURE_S and len(seconds) <= MAX_RUNS):
            began = time.perf_counter()
            device.replay(executable)
            seconds.append(time.perf_counter() - began)
    finally:
        executable.close()
    return seconds[1:]
