"""The Kompute runtime: a device behind the runtime seam whose work is done by the `kp` package.

Order: kp records no barrier between dispatches, so one word is synced to the host where the recording has a
barrier: that waits for compute before its copy, and kp's own barrier in front of a dispatch waits for copies
before compute; the two form one chain (Vulkan 1.3, 7.2, execution dependencies). Its memory side covers the
buffers these barriers name, not all that was written: this relies on drivers doing the cache work of a buffer
barrier for all memory, as Mesa's do. Fences cover all memory: VKBACKEND_KOMPUTE_ORDER=submit uses them alone.
Devices run in parallel, and with deadlines, because each has a process of its own (kompute_worker.py): kp
holds the GIL while it waits, and waits for ever. Staging buffers are shared with that process, which carries
what a segment reads and writes there to and from the device's memory.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from vkbackend import env, faults, ops, shaderlib
from vkbackend.buffer import Buffer, Home, View
from vkbackend.capabilities import DeviceInfo, compute_family, free_nbytes, limits_of
from vkbackend.codebooks import codebook_of
from vkbackend.codebooks import entries as codebook_entries
from vkbackend.errors import DeviceLost, OutOfDeviceMemory, Timeout, UnsupportedFeature, VkbackendError
from vkbackend.instance import position
from vkbackend.kompute_process import ANSWER_S, Process
from vkbackend.limits import Limits
from vkbackend.memory import aligned
from vkbackend.profiling import report_order, report_times
from vkbackend.recording import (
    Barrier,
    Copy,
    Cut,
    Dispatch,
    Range,
    Recording,
    Scope,
    push_constants,
    submissions,
)
from vkbackend.runtime import Device, Executable, Queue
from vkbackend.transfers import Transfers
from vkbackend.vk import C, check

MAX_TENSOR_NBYTES = (1 << 32) - 256  # kp counts bytes in 32 bits


class KomputeDevice(Device):
    """`info` opened once more as a kp Manager with no optional feature enabled, in a worker process."""

    queue: KomputeQueue

    def __init__(self, info: DeviceInfo, label: str = "") -> None:
        self.info = info
        self.name = label or f"Vulkan{info.index}"
        self.counts: Counter[str] = Counter()
        self.created = 0
        self.nbytes: Counter[Home] = Counter()
        self.limits = _limits(info)
        self.queue = KomputeQueue(self)
        self.closed = False
        self.numbers = itertools.count(1)
        self._transfers = KomputeTransfers(self)
        self._modules: dict[tuple[str, str], int] = {}
        self._codebooks: dict[str, Buffer] = {}
        self._process = Process(self.name)
        try:
            family = compute_family(info.physical)[0]  # type: ignore[index]
            code = storage_only(shaderlib.spirv("copy_words", "f32"))
            opened = self.call("open", position(info), family, code)
            if opened != info.name:
                raise UnsupportedFeature(
                    f"{self.name}: kp opened {opened}, not {info.name}; the two list devices in another order"
                )
        except BaseException:
            self.close()
            raise
        self.made("kp.Manager")
        env.log(1, f"{self.name}: {info.name}, {info.driver} {info.driver_version}, kompute")

    def made(self, kind: str, n: int = 1) -> None:
        self.counts[kind] += n
        self.created += n

    def gone(self, kind: str, n: int = 1) -> None:
        self.counts[kind] -= n
        if not self.counts[kind]:
            del self.counts[kind]

    # ---- the worker ----

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, name: str, *args: Any, fd: int | None = None) -> Any:
        """What the worker answers, behind everything it was asked before. Raises DeviceLost, Timeout."""
        self.post(name, *args, fd=fd)
        self.queue.take(env.timeout_s() + ANSWER_S)
        if not self.answers(env.timeout_s() + ANSWER_S):
            self._process.kill()
            raise Timeout(f"{self.name} did not finish {name!r} in {env.timeout_s()} s; load the model again")
        return self.answer()

    def post(self, name: str, *args: Any, fd: int | None = None) -> None:
        """A request whose answer is taken later, in order."""
        self._process.send((name, *args), fd)

    def release(self, name: str, number: int) -> None:
        """Let the worker drop something; with its process everything of it is gone already."""
        try:
            self.call(name, number)
        except (DeviceLost, Timeout) as error:
            env.log(1, f"{self.name}: {name}: {error}")

    def answers(self, timeout_s: float) -> bool:
        """Whether there is an answer to take within the time."""
        return self._process.answers(timeout_s)

    def answer(self) -> Any:
        return self._process.answer()

    def check(self, what: str) -> None:
        """Raise what an injected fault gives to a Vulkan call that kp makes for us."""
        if faults.planned and (injected := faults.struck(self.name, what)):
            check(getattr(C, injected), f"{self.name} ({self.info.name}): {what}")

    # ---- memory ----

    def buffer(self, nbytes: int, home: Home, label: str) -> Buffer:
        nbytes = aligned(nbytes)
        self._check_fits(nbytes, home, label)
        self.check(f"vkCreateBuffer of {nbytes} bytes for {label}")
        self.check(f"vkAllocateMemory of {nbytes} bytes for {label}")
        buffer = Buffer(nbytes, home, label, handle=next(self.numbers))
        visible, shared, fd = home in (Home.STAGING, Home.HOST), home is Home.STAGING, None
        try:
            if shared:
                fd = os.memfd_create("vkbackend staging")
                os.ftruncate(fd, nbytes)
                buffer.host = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
            self.call("tensor", buffer.handle, nbytes // 4, visible, shared, fd=fd)
        except DeviceLost as error:  # kp goes on with memory that it did not get, and ends its process
            raise OutOfDeviceMemory(
                f"{self.name} ({self.info.name}): {nbytes} bytes for {label} could not be allocated; "
                "use a smaller context or more devices",
                requested=nbytes,
            ) from error
        finally:
            if fd is not None:
                os.close(fd)
        self.made("kp.Tensor")
        self.nbytes[home] += nbytes
        if env.poison():
            self.write(View(buffer, 0, (nbytes // 4,), "u32"), np.full(nbytes // 4, 0xFFFFFFFF, np.uint32))
        return buffer

    def _check_fits(self, nbytes: int, home: Home, label: str) -> None:
        """Refuse what kp would fail to allocate without saying so."""
        local = home not in (Home.STAGING, Home.HOST)
        heaps = [h.nbytes for h in self.info.heaps if h.device_local or not local]
        budget = max(heaps or [h.nbytes for h in self.info.heaps])
        taken = sum(n for h, n in self.nbytes.items() if (h not in (Home.STAGING, Home.HOST)) == local)
        for limit, why in (
            (self.limits.max_allocation_nbytes, "can be bound at once"),
            (budget - taken, "are left of the heap"),
        ):
            if nbytes > limit:
                raise OutOfDeviceMemory(
                    f"{self.name} ({self.info.name}): {label} needs {nbytes} bytes, and {limit} {why}; "
                    "use a smaller context or micro-batch, more devices, or the native runtime",
                    requested=nbytes,
                    budget=limit,
                )

    def free(self, buffer: Buffer) -> None:
        buffer.host = None
        self._transfers.canaries.pop(buffer, None)
        self.release("free", buffer.handle)
        self.gone("kp.Tensor")
        self.nbytes[buffer.home] -= buffer.nbytes

    def free_nbytes(self) -> int | None:
        return free_nbytes(self.info)

    def write(self, view: View, data: np.ndarray) -> None:
        self._transfers.write(view, data)

    def read(self, view: View) -> np.ndarray:
        return self._transfers.read(view)

    def drop_upload(self) -> None:
        self._transfers.check()
        self._transfers.drop_upload()

    # ---- recordings ----

    def build(self, recording: Recording, *, timed: bool = False) -> KomputeExecutable:
        return KomputeExecutable(self, recording, timed)

    def no_longer_loading(self) -> None:
        """Something is about to run that may write what was loaded."""
        self._transfers.canaries.clear()

    def commands(self, part: Iterable[Any]) -> list[Any]:
        """What the worker records for a submission: algorithms with their push constants, None to wait."""
        commands: list[Any] = []
        for command in part:
            if isinstance(command, Barrier):
                # A submission begins when the one before has ended, and its end is waited for.
                if command.scope is Scope.DEVICE and commands:
                    commands.append(None)
                continue
            if isinstance(command, Copy):
                command = self._as_dispatch(command)
            views = [*command.args, command.step] if command.step else list(command.args)
            assert not command.step or command.step.offset == 0, f"{command.step} does not begin its buffer"
            handles = tuple(view.buffer.handle for view in views)
            if codebook := codebook_of(command.op, command.variant):
                handles += (self._codebook(codebook).handle,)
            consts = tuple(value & 0xFFFFFFFF for _, value in command.consts)
            commands.append(
                (
                    (self._module(command), consts, command.groups, handles),
                    push_constants(command, [view.offset // 4 for view in command.args]),
                )
            )
        return commands

    def _codebook(self, name: str) -> Buffer:
        """The codebook of a format, loaded on first use; behind the other bindings of those who read it."""
        if name not in self._codebooks:
            data = codebook_entries(name)
            self._codebooks[name] = buffer = self.buffer(data.nbytes, Home.WEIGHTS, f"{name} codebook")
            self.write(View(buffer, 0, (-(-data.nbytes // 4),), "u32"), data)
            self.drop_upload()
        return self._codebooks[name]

    def _as_dispatch(self, copy: Copy) -> Dispatch:
        recording = Recording("copy")
        ops.copy_words(recording, self.limits, copy.src, copy.dst, label=copy.label)
        (dispatch,) = recording.accesses()
        assert isinstance(dispatch, Dispatch)
        return dispatch

    def _module(self, dispatch: Dispatch) -> int:
        key = dispatch.op, dispatch.variant
        if key == ("copy_words", "f32"):
            return 0
        if key not in self._modules:
            self.check(f"vkCreateComputePipelines of {dispatch.op} {dispatch.variant}")
            n = len(self._modules) + 1
            self.call("module", n, storage_only(shaderlib.spirv(*key)))
            self._modules[key] = n
        return self._modules[key]

    # ---- the end ----

    def settle(self) -> bool:
        try:
            if self.abandoned or not self.queue.wait(self.queue.submitted, ANSWER_S):
                self._process.kill()  # it leaves nothing behind, unlike a native device
        except VkbackendError:
            pass
        return True

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.settle()
        self._process.close()
        self.counts.clear()
        self.nbytes.clear()


class KomputeTransfers(Transfers):
    """Copies by the op copy_words, because kp copies whole tensors only. `canaries` holds the last word that
    was written to each buffer since something ran."""

    _device: KomputeDevice

    def __init__(self, device: KomputeDevice) -> None:
        super().__init__(device)
        self.canaries: dict[Buffer, tuple[int, bytes]] = {}

    def _copy(self, src: Buffer, src_at: int, dst: Buffer, dst_at: int, nbytes: int) -> None:
        n = -(-nbytes // 4)
        if nbytes % 4 and src is self._upload:  # the bytes behind them in the last word stay as they are
            spare = src.nbytes - 4
            self._copy_words(dst, dst_at + 4 * n - 4, src, spare, 1)
            end = src_at + nbytes
            src.host[end : src_at + 4 * n] = src.host[spare + nbytes % 4 : spare + 4]
        self._copy_words(src, src_at, dst, dst_at, n)
        if src is self._upload:
            self.canaries[dst] = dst_at + 4 * n - 4, bytes(src.host[src_at + 4 * n - 4 : src_at + 4 * n])

    def _copy_words(self, src: Buffer, src_at: int, dst: Buffer, dst_at: int, n: int) -> None:
        copy = Copy(View(src, src_at, (n,), "u32"), View(dst, dst_at, (n,), "u32"))
        self._device.call("once", self._device.commands([copy]), *_spans([copy]))

    def _order(self) -> None:
        pass  # whoever asked for work has waited for it

    def check(self) -> None:
        """See that what was written is there: kp ignores failed allocations."""
        for buffer, (offset, wanted) in self.canaries.items():
            got = bytes(self.read(View(buffer, offset, (1,), "u32")))
            if got != wanted:
                device = self._device
                raise OutOfDeviceMemory(
                    f"{device.name} ({device.info.name}): {buffer.label} of {buffer.nbytes} bytes does not "
                    f"hold what was written to it ({got.hex()}, not {wanted.hex()}), so the driver did not "
                    "allocate it or did not copy; use a smaller context or more devices",
                    requested=buffer.nbytes,
                )
        self.canaries.clear()


class KomputeExecutable(Executable):
    """Sequences in the worker, one per submission. `timed` keeps a timestamp behind every command."""

    def __init__(self, device: KomputeDevice, recording: Recording, timed: bool) -> None:
        if env.kompute_order() == "submit":
            commands = [Cut() if c == Barrier(Scope.DEVICE) else c for c in recording.commands]
            recording = Recording(recording.name, commands)
        self._device, self.recording = device, recording
        self.number = next(device.numbers)
        self._timed = (timed or env.debug() >= 2) and bool(device.info.limits["timestamp_valid_bits"])
        segments = recording.segments()
        self.n_segments = len(segments)
        self._parts = [part for segment in segments for part in submissions(segment)]
        parts = [[device.commands(part) for part in submissions(segment)] for segment in segments]
        device.check("vkAllocateCommandBuffers")
        device.call("build", self.number, parts, [_spans(segment) for segment in segments], self._timed)
        device.made("kp.Sequence", len(self._parts))
        if env.debug() >= 3:
            report_order(device.name, recording)

    def report(self) -> None:
        if self._timed:
            report_times(self._device.name, self.durations())

    def durations(self) -> list[tuple[Dispatch | Copy, float]]:
        """(command, microseconds) of the last replay, which must have finished."""
        assert self._timed, "built without timestamps"
        us, found = self._device.info.limits["timestamp_ps"] / 1e6, []
        for part, ticks in zip(self._parts, self._device.call("times", self.number), strict=True):
            # One timestamp at the start, one behind each command and each wait, in this order.
            at = 0
            for command in part:
                if isinstance(command, Dispatch | Copy):
                    at += 1
                    found.append((command, (ticks[at] - ticks[at - 1]) * us))
                elif command == Barrier(Scope.DEVICE) and at:
                    at += 1
        return found

    def close(self) -> None:
        self._device.release("drop", self.number)
        self._device.gone("kp.Sequence", len(self._parts))


class KomputeQueue(Queue):
    """One request per segment; the worker runs them in order, each when it may run."""

    ahead = False

    def __init__(self, device: KomputeDevice) -> None:
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
        """Take the answers that are there, and within the time those that are still due."""
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
        pass  # nothing is submitted before it may run

    def wait(self, number: int, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.completed() < number:
            if not self.device.answers(max(0.0, deadline - time.monotonic())):
                return False
        return True


def _spans(segment: Iterable[Any]) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """The words of shared tensors that a segment reads and writes, as (tensor, first, end)."""
    accesses = [command for command in segment if isinstance(command, Dispatch | Copy)]
    return (
        _merged(r for command in accesses for r in command.reads),
        _merged(r for command in accesses for r in command.writes),
    )


def _merged(ranges: Iterable[Range]) -> list[tuple[int, int, int]]:
    spans: list[tuple[int, int, int]] = []
    of_host = [r for r in ranges if isinstance(r.buffer, Buffer) and r.buffer.home is Home.STAGING]
    for number, begin, end in sorted((r.buffer.handle, r.begin // 4, r.end // 4) for r in of_host):  # type: ignore[union-attr]
        if spans and spans[-1][0] == number and begin <= spans[-1][2]:
            spans[-1] = number, spans[-1][1], max(end, spans[-1][2])
        else:
            spans.append((number, begin, end))
    return spans


def _limits(info: DeviceInfo) -> Limits:
    """kp binds whole tensors, and enables no feature."""
    have = limits_of(info)
    nbytes = min(have.max_allocation_nbytes, have.max_storage_range, MAX_TENSOR_NBYTES)
    if env.floor():
        have = Limits.floor()
    return replace(have, max_allocation_nbytes=nbytes)


def storage_only(code: bytes) -> bytes:
    """SPIR-V whose bindings are what kp makes: storage buffers of one descriptor set.

    Pointers to and variables of the storage class Uniform become those of StorageBuffer (SPIR-V 1.3, 3.7);
    decorations and explicit layouts fit both. Bindings of other sets go behind those of set 0.
    """
    uniform, storage_buffer = 2, 12
    class_at = {32: 2, 59: 3}  # OpTypePointer, OpVariable: where their storage class is
    op_decorate, binding, descriptor_set = 71, 33, 34
    words, at = np.frombuffer(code, np.uint32).copy(), 5
    places: dict[int, dict[int, int]] = {binding: {}, descriptor_set: {}}  # by variable: where the value is
    while at < words.size:
        op, length = int(words[at]) & 0xFFFF, int(words[at]) >> 16
        if op in class_at and words[at + class_at[op]] == uniform:
            words[at + class_at[op]] = storage_buffer
        elif op == op_decorate and int(words[at + 2]) in places:
            places[int(words[at + 2])][int(words[at + 1])] = at + 3
        at += length
    moved = [variable for variable, at in places[descriptor_set].items() if words[at]]
    n = sum(1 for at in places[descriptor_set].values() if not words[at])
    for number, variable in enumerate(moved, n):
        words[places[descriptor_set][variable]], words[places[binding][variable]] = 0, number
    return words.tobytes()
