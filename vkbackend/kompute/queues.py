from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from typing import Any, Protocol

from vkbackend import env
from vkbackend.buffer import Buffer, Home
from vkbackend.device_info import DeviceInfo
from vkbackend.errors import DeviceLost, VkbackendError
from vkbackend.profiling import report_order, report_times
from vkbackend.recording import Barrier, Copy, Cut, Dispatch, Range, Recording, Scope, submissions
from vkbackend.runtime import Executable, Queue
from vkbackend.transfers import Memory

# Name prefixes of drivers whose buffer barriers flush and invalidate caches for all memory.
WORD_DRIVERS = ("llvmpipe", "radv", "Intel open-source Mesa driver", "SwiftShader", "turnip", "NVK", "venus")


def order_of(driver: str) -> str:
    """Return how to order dependent dispatches: "word" or "submit" (env.kompute_order)."""
    trusted = any(driver.lower().startswith(name.lower()) for name in WORD_DRIVERS)
    return env.kompute_order() or ("word" if trusted else "submit")


class WorkerDevice(Memory, Protocol):
    """Methods of KomputeDevice that executables, the queue and transfers call."""

    name: str
    info: DeviceInfo
    numbers: itertools.count[int]  # yields numbers for new objects in the worker

    def call(self, name: str, *args: Any) -> Any: ...

    def post(self, name: str, *args: Any) -> int: ...

    def release(self, name: str, number: int) -> None: ...

    def answers(self, timeout_s: float) -> bool: ...

    def answer(self) -> Any: ...

    def check(self, call: str) -> None: ...

    def commands(self, part: Iterable[Any]) -> list[Any]: ...

    def no_longer_loading(self) -> None: ...

    def made(self, kind: str, n: int = 1) -> None: ...

    def gone(self, kind: str, n: int = 1) -> None: ...


class KomputeExecutable(Executable):
    """An executable with a kp sequence per submission. If `timed` is set, a timestamp follows every
    command."""

    def __init__(self, device: WorkerDevice, recording: Recording, timed: bool) -> None:
        if order_of(device.info.driver) == "submit":
            commands = [Cut() if is_between(c) else c for c in recording.commands]
            recording = Recording(recording.name, commands)
        self._device, self.recording = device, recording
        self.number = next(device.numbers)
        self._timed = (timed or env.debug() >= 2) and bool(device.info.limits["timestamp_valid_bits"])
        segments = recording.segments()
        self.n_segments = len(segments)
        self._parts = [part for segment in segments for part in submissions(segment)]
        parts = [[device.commands(part) for part in submissions(segment)] for segment in segments]
        device.check("vkAllocateCommandBuffers")
        device.call("build", self.number, parts, [spans(segment) for segment in segments], self._timed)
        device.made("kp.Sequence", len(self._parts))
        if env.debug() >= 3:
            report_order(device.name, recording)

    def report(self) -> None:
        if self._timed:
            report_times(self._device.name, self.durations())

    def durations(self) -> list[tuple[Dispatch | Copy, float]]:
        assert self._timed, "built without timestamps"
        us, times = self._device.info.limits["timestamp_ps"] / 1e6, []
        for part, ticks in zip(self._parts, self._device.call("times", self.number), strict=True):
            # A submission has timestamps at its start, after each command and after each barrier.
            at = 0
            for command in part:
                if isinstance(command, Dispatch | Copy):
                    at += 1
                    times.append((command, (ticks[at] - ticks[at - 1]) * us))
                elif is_between(command) and at:
                    at += 1
        return times

    def close(self) -> None:
        self._device.release("drop", self.number)
        self._device.gone("kp.Sequence", len(self._parts))


class KomputeQueue(Queue):
    ahead = False

    def __init__(self, device: WorkerDevice) -> None:
        self.device = device
        self.submitted = self._done = 0
        self._lost = ""

    def submit(self, executable: Any, first: int, count: int) -> None:
        self.device.no_longer_loading()
        for segment in range(first, first + count):
            self._check("vkQueueSubmit")
            self.device.post("run", executable.number, segment)
            self.submitted += 1

    def _check(self, call: str) -> None:
        if self._lost:
            raise DeviceLost(self._lost)
        self.device.check(call)

    def completed(self) -> int:
        self._check("vkWaitForFences")
        self.take(0)
        return self._done

    def take(self, timeout_s: float) -> None:
        """Receive the answers to all submitted segments within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self._done < self.submitted and self.device.answers(max(0.0, deadline - time.monotonic())):
            try:
                self.device.answer()
            except DeviceLost as error:
                self._lost = str(error)
                raise
            except VkbackendError as error:
                self._done += 1
                self._lost = f"{error}; close the model and load it again"
                raise DeviceLost(self._lost) from error
            self._done += 1

    def allow(self, number: int) -> None:
        pass  # segments are submitted only when they may run

    def wait(self, number: int, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.completed() < number:
            if not self.device.answers(max(0.0, deadline - time.monotonic())):
                return False
        return True


# Memory that this process and kp's process map.
SHARED = (Home.STAGING, Home.STREAM)


def is_between(command: Any) -> bool:
    return isinstance(command, Barrier) and command.scope is Scope.DEVICE


def spans(segment: Iterable[Any]) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Return the words of shared tensors that a segment reads, and the words that it writes, as two lists of
    (tensor, first, end)."""
    accesses = [command for command in segment if isinstance(command, Dispatch | Copy)]
    return (
        _merged(r for command in accesses for r in command.reads),
        _merged(r for command in accesses for r in command.writes),
    )


def _merged(ranges: Iterable[Range]) -> list[tuple[int, int, int]]:
    spans: list[tuple[int, int, int]] = []
    of_host = [r for r in ranges if isinstance(r.buffer, Buffer) and r.buffer.home in SHARED]
    for number, begin, end in sorted((r.buffer.handle, r.begin // 4, r.end // 4) for r in of_host):  # type: ignore[union-attr]
        if spans and spans[-1][0] == number and begin <= spans[-1][2]:
            spans[-1] = number, spans[-1][1], max(end, spans[-1][2])
        else:
            spans.append((number, begin, end))
    return spans
