"""Replays products that read matrices from one kind of memory, to measure a device's speed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np

from vkbackend import ops
from vkbackend.buffer import Buffer, Home, View
from vkbackend.formats import row_nbytes
from vkbackend.meta.known_speed import DTYPE
from vkbackend.recording import Recording, derive_barriers
from vkbackend.runtime import Device

WIDTH = 4096
GPU_NBYTES, GPU_MATRICES = 256 << 20, 8  # Several times any cache.
# Software devices are limited by arithmetic, so fewer bytes suffice.
SOFTWARE_NBYTES, SOFTWARE_MATRICES = 8 << 20, 4
HEAP_SHARE = 8  # Matrices take at most 1 / HEAP_SHARE of a device's memory.
MEASURE_S = 0.3  # Seconds per kind of memory, after a warm-up.
MIN_RUNS, MAX_RUNS = 2, 50
# An H100 reads the matrices in 0.1 ms, about the time of a submission and its wait. So a submission reads
# them several times.
LEAST_S, MAX_ROUNDS = 0.005, 256


def measured_nbytes(device: Device, of_gpu: int, of_software: int) -> int:
    info = device.physical
    total = of_gpu if info and not info.is_cpu else of_software
    return min(total, max(heap.nbytes for heap in info.heaps) // HEAP_SHARE) if info else total


class Reading:
    """Multiplies matrices by a row. The matrices have `nbytes` in total, more than every cache. `matrices`
    are their buffers."""

    def __init__(self, device: Device, home: Home) -> None:
        self._device, self._buffers, self.matrices = device, list[Buffer](), list[Buffer]()
        total = measured_nbytes(device, GPU_NBYTES, SOFTWARE_NBYTES)
        count = GPU_MATRICES if total > SOFTWARE_NBYTES else SOFTWARE_MATRICES
        row = row_nbytes(DTYPE, WIDTH)
        shape = max(1, total // count // row), WIDTH
        # If a scale's bytes are in this range, the scale is finite and normal.
        stored = np.random.default_rng(0).integers(0x20, 0x30, shape[0] * row, np.uint8)
        self.nbytes = count * stored.nbytes
        x = self._view(4 * WIDTH, Home.SCRATCH, (1, WIDTH), "f32")
        device.write(x, np.ones(WIDTH, np.float32))
        self._x, self._operand = x, x
        if (dtype := ops.operand_type(device.limits, 1, DTYPE)) != "f32":
            self._operand = self._view(row_nbytes(dtype, WIDTH), Home.SCRATCH, (1, WIDTH), dtype)
        self._products: list[tuple[View, View]] = []
        for _ in range(count):
            w = self._view(stored.nbytes, home, shape, DTYPE)
            self.matrices.append(self._buffers[-1])
            self._products.append((w, self._view(4 * shape[0], Home.SCRATCH, (1, shape[0]), "f32")))
            device.write(w, stored)
        recording = Recording("weight reading")
        self._record(recording)
        self.executable = device.build(derive_barriers(recording))

    def _view(self, nbytes: int, home: Home, shape: tuple[int, ...], dtype: str) -> View:
        self._buffers.append(self._device.buffer(nbytes, home, "measured"))
        return View(self._buffers[-1], 0, shape, dtype)

    def _record(self, recording: Recording) -> None:
        on = ops.Recorder(recording, self._device.limits)
        if self._operand is not self._x:
            on.convert(self._x, self._operand)
        for w, y in self._products:
            on.mat(w, self._operand, y)

    def run(self) -> None:
        self._device.replay(self.executable)

    def rate(self) -> float:
        return self.nbytes / seconds_per_round(self._device, self._record)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.executable.close()
        for buffer in self._buffers:
            self._device.free(buffer)


def run_times(run: Callable[[], object]) -> list[float]:
    """Return the seconds of each run, after a warm-up."""
    seconds: list[float] = []
    while len(seconds) < 1 + MIN_RUNS or (sum(seconds[1:]) < MEASURE_S and len(seconds) <= MAX_RUNS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def seconds_per_round(device: Device, record: Callable[[Recording], None]) -> float:
    """Return the median seconds of the commands that `record` adds. They are repeated within a submission
    until it takes LEAST_S."""
    rounds = 1
    while True:
        recording = Recording("rounds")
        for _ in range(rounds):
            record(recording)
        executable = device.build(derive_barriers(recording))
        try:
            seconds = float(np.median(run_times(partial(device.replay, executable))))
        finally:
            executable.close()
        if seconds >= LEAST_S or rounds > 1:
            return seconds / rounds
        rounds = min(MAX_ROUNDS, math.ceil(LEAST_S / seconds))
