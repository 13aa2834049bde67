"""Devices without a driver. `NumpyDevice` runs the numpy twins. `NullDevice` only counts dispatches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from vkbackend.buffer import Buffer, Home, View, aligned
from vkbackend.formats import dequantize, row_nbytes
from vkbackend.limits import Limits
from vkbackend.pages import Pages
from vkbackend.recording import Command, Copy, Dispatch, Recording
from vkbackend.runtime import Device, Executable, Queue, RecordedCopies
from vkbackend.step import StepParams
from vkbackend.twins import twin_of

WEIGHT_HOMES = (Home.WEIGHTS, Home.HOST, Home.STREAM, Home.MAPPED)
_PLAIN = {"f32": np.float32, "f16": np.float16, "u32": np.uint32, "u8": np.uint8}


def _bytes(view: View) -> np.ndarray:
    assert isinstance(view.buffer, Buffer), f"{view} has no address"
    return np.asarray(view.buffer.host)[view.offset : view.end]


def array_of(view: View) -> np.ndarray:
    """Return the view as an array. Plain types share the view's memory, and block formats are dequantized."""
    raw = _bytes(view)
    if view.dtype in _PLAIN:
        n = math.prod(view.shape)
        return raw.view(_PLAIN[view.dtype])[:n].reshape(view.shape)
    return dequantize(raw, view.dtype, view.shape)


class Values:
    """Dequantized weights up to `MOST_NBYTES`. A weight whose bytes have changed is dequantized again."""

    MOST_NBYTES = 16 << 20

    def __init__(self) -> None:
        self._kept: dict[View, tuple[np.ndarray, np.ndarray]] = {}
        self._nbytes = 0

    def of(self, view: View) -> np.ndarray:
        if view.dtype in _PLAIN or view.buffer.home not in WEIGHT_HOMES:  # type: ignore[union-attr]
            return array_of(view)
        raw = _bytes(view)
        if kept := self._kept.get(view):
            values, old = kept
            if np.array_equal(raw, old):
                return values
            self._drop(view)
        values = array_of(view)
        if (nbytes := values.nbytes + raw.nbytes) + self._nbytes <= self.MOST_NBYTES:
            values.flags.writeable = False
            self._kept[view] = values, raw.copy()
            self._nbytes += nbytes
        return values

    def forget(self, buffer: Buffer) -> None:
        for view in [view for view in self._kept if view.buffer is buffer]:
            self._drop(view)

    def _drop(self, view: View) -> None:
        self._nbytes -= sum(array.nbytes for array in self._kept.pop(view))


def stored(view: View) -> np.ndarray:
    """Return the view as an array that shares its memory, with rows of bytes if numpy lacks the type."""
    if view.dtype in _PLAIN:
        return array_of(view)
    nbytes = row_nbytes(view.dtype, view.shape[-1])
    return _bytes(view)[: math.prod(view.shape[:-1]) * nbytes].reshape(*view.shape[:-1], nbytes)


def run_dispatch(dispatch: Dispatch, weights: Values) -> None:
    args: list[Any] = [
        stored(view) if i in dispatch.written else weights.of(view) for i, view in enumerate(dispatch.args)
    ]
    if dispatch.step is not None:
        args.append(StepParams(_bytes(dispatch.step).view(np.uint32)))
    named = {name.lower(): value for name, value in dispatch.consts} | dict(dispatch.push)
    twin_of(dispatch.op)(*args, **named, variant=dispatch.variant, groups=dispatch.groups)


class HostExecutable(Executable):
    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.n_segments = recording.n_segments

    @cached_property
    def segments(self) -> list[list[Command]]:
        return self.recording.segments()

    def close(self) -> None:
        pass


class HostQueue(Queue):
    """Runs a segment within `submit` or `allow`, as soon as it may run."""

    ahead = True

    def __init__(self, device: HostDevice) -> None:
        self._device = device
        # queued segments: (waits for `allow`, commands)
        self._pending: list[tuple[bool, list[Any]]] = []
        self.submitted = self._done = self._allowed = 0

    def submit(self, executable: Any, first: int, count: int) -> None:
        self._pending += [(s > 0, executable.segments[s]) for s in range(first, first + count)]
        self.submitted += count
        self._run()

    def completed(self) -> int:
        return self._done

    def allow(self, number: int) -> None:
        self._allowed = max(self._allowed, number)
        self._run()

    def _run(self) -> None:
        while self._pending and (not self._pending[0][0] or self._done < self._allowed):
            _, commands = self._pending.pop(0)
            for command in commands:
                self._device.execute(command)
            self._done += 1

    def wait(self, number: int, timeout_s: float) -> bool:
        return self._done >= number


class HostCopies(RecordedCopies):
    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies

    def begin(self) -> None:
        for copy in self._copies:
            _bytes(copy.dst)[:] = _bytes(copy.src)

    def wait(self) -> None:
        pass

    def follow(self) -> None:
        self.begin()

    def close(self) -> None:
        pass


class HostDevice(Device):
    """A device whose buffers are numpy arrays."""

    imports_pages = has_visible = records_copies = True

    def __init__(self, name: str, limits: Limits | None = None) -> None:
        self.name = name
        self.limits = limits or Limits()
        self.counts, self.created, self.nbytes = Counter(), 0, Counter()
        self._copies: Sequence[Copy] = ()
        self.queue = HostQueue(self)

    def buffer(self, nbytes: int, home: Home, label: str) -> Buffer:
        self.counts["buffer"] += 1
        self.created += 1
        self.nbytes[home] += aligned(nbytes)
        # Bytes 0xFF are NaN, so a read before a write yields NaN.
        return Buffer(aligned(nbytes), home, label, host=np.full(aligned(nbytes), 0xFF, np.uint8))

    def free(self, buffer: Buffer) -> None:
        self.counts["buffer"] -= 1
        self.nbytes[buffer.home] -= buffer.nbytes
        buffer.host = None

    def import_pages(self, pages: Pages, label: str) -> Buffer:
        self.counts["buffer"] += 1
        self.created += 1
        self.nbytes[pages.home] += pages.nbytes
        return Buffer(pages.nbytes, pages.home, label, host=pages.bytes)

    def write(self, view: View, data: np.ndarray) -> None:
        _bytes(view)[: data.nbytes] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)

    def read(self, view: View) -> np.ndarray:
        return _bytes(view).copy()

    def build(self, recording: Recording, *, events: bool = False) -> HostExecutable:
        self.created += 1
        return HostExecutable(recording)

    def recorded_copies(self, copies: Sequence[Copy]) -> RecordedCopies:
        return HostCopies(copies)

    def begin_copies(self, copies: Sequence[Copy]) -> None:
        """Fill the targets with NaN until the first poll, so a step that reads a target too early computes
        NaN."""
        assert not self._copies, "the previous copies have not ended"
        self._copies = copies
        for copy in copies:
            _bytes(copy.dst)[:] = 0xFF

    def copies_ended(self) -> bool:
        for copy in self._copies:
            _bytes(copy.dst)[:] = _bytes(copy.src)
        self._copies = ()
        return True

    def execute(self, command: Any) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.counts.clear()
        self.nbytes.clear()


class NumpyDevice(HostDevice):
    def __init__(self, name: str, limits: Limits | None = None) -> None:
        super().__init__(name, limits)
        self._weights = Values()

    def free(self, buffer: Buffer) -> None:
        self._weights.forget(buffer)
        super().free(buffer)

    def execute(self, command: Any) -> None:
        if isinstance(command, Dispatch):
            run_dispatch(command, self._weights)
        elif isinstance(command, Copy):
            _bytes(command.dst)[:] = _bytes(command.src)


class NullDevice(HostDevice):
    def __init__(self, name: str, limits: Limits | None = None) -> None:
        super().__init__(name, limits)
        self.executed: Counter[str] = Counter()

    def execute(self, command: Any) -> None:
        self.executed[command.op if isinstance(command, Dispatch) else type(command).__name__.lower()] += 1
