"""A device of the kompute runtime.

Kompute's Python package `kp` records no barriers between dispatches. So each barrier of a recording becomes a
copy of one word to the host. The copy waits for earlier dispatches, and the next dispatch waits for the copy
(Vulkan 1.3, 7.2, execution dependencies). The barriers of the copy name only its own buffers. They make all
writes visible only if the driver flushes and invalidates caches for all memory (WORD_DRIVERS). On other
drivers a submission ends at every barrier, because a fence covers all memory.

Waiting in `kp` holds the GIL and has no timeout, so every device has a worker process (worker.py). The worker
copies between the staging buffers, which are shared memory, and device memory.
"""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from vkbackend import env, faults, shaderlib
from vkbackend.buffer import Buffer, Home, View, aligned
from vkbackend.codebooks import codebook_of
from vkbackend.codebooks import entries as codebook_entries
from vkbackend.device_info import DeviceInfo, limits_of
from vkbackend.errors import DeviceLost, OutOfDeviceMemory, Timeout, UnsupportedFeature, VkbackendError
from vkbackend.kompute.process import ANSWER_S, Process
from vkbackend.kompute.queues import SHARED, KomputeExecutable, KomputeQueue
from vkbackend.kompute.spirv import storage_only
from vkbackend.kompute.transfers import KomputeTransfers
from vkbackend.limits import Limits
from vkbackend.ops import Recorder
from vkbackend.recording import (
    Barrier,
    Copy,
    Dispatch,
    Recording,
    Scope,
    push_constants,
)
from vkbackend.runtime import Device
from vkbackend.vulkan.capabilities import compute_family, free_nbytes
from vkbackend.vulkan.instance import position
from vkbackend.vulkan.vk import check, result_of

_open: weakref.WeakSet[KomputeDevice] = weakref.WeakSet()
MAX_TENSOR_NBYTES = (1 << 32) - 256  # kp has 32-bit sizes


class KomputeDevice(Device):
    """A device without optional features, controlled by a kp Manager in a worker process."""

    queue: KomputeQueue
    has_codebooks = True
    REFUSED = *Device.REFUSED, "call", "post"
    IGNORED = *Device.IGNORED, "release"

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
            try:
                opened = self.call("open", position(info), family, code)
            except DeviceLost as error:  # kp did not load
                raise UnsupportedFeature(
                    f"{self.name}: the kompute worker could not open the device ({error}); if kp itself does "
                    "not load, make its environment again: bash tools/setup.sh --kompute"
                ) from error
            if opened != info.name:
                raise UnsupportedFeature(
                    f"{self.name}: kp opened {opened}, not {info.name}; the two list devices in another order"
                )
        except BaseException:
            self.close()
            raise
        self.made("kp.Manager")
        _open.add(self)
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
        """Raises DeviceLost, Timeout."""
        number = self.post(name, *args, fd=fd)
        try:
            self.queue.take(env.timeout_s() + ANSWER_S)
            if not self.answers(env.timeout_s() + ANSWER_S):
                self._process.kill()
                raise Timeout(
                    f"{self.name} did not finish {name!r} in {env.timeout_s()} s; load the model again"
                )
            return self.answer()
        except BaseException:  # Even after Ctrl-C, the next request must not get this answer.
            self._process.forget(number)
            raise

    def post(self, name: str, *args: Any, fd: int | None = None) -> int:
        """Send a request and return its number. Answers arrive in the order of the requests."""
        return self._process.send((name, *args), fd)

    def release(self, name: str, number: int) -> None:
        """Free an object in the worker. If the worker has ended, only log this."""
        try:
            self.call(name, number)
        except (DeviceLost, Timeout) as error:
            env.log(1, f"{self.name}: {name}: {error}")

    def answers(self, timeout_s: float) -> bool:
        return self._process.answers(timeout_s)

    def answer(self) -> Any:
        return self._process.answer()

    def check(self, call: str) -> None:
        """Raise the fault that is injected into a Vulkan call of kp."""
        if faults.planned and (injected := faults.struck(self.name, call)):
            check(result_of(injected), f"{self.name} ({self.info.name}): {call}")

    # ---- memory ----

    @property
    def physical(self) -> DeviceInfo:
        return self.info

    def buffer(self, nbytes: int, home: Home, label: str) -> Buffer:
        nbytes = aligned(nbytes)
        self._check_fits(nbytes, home, label)
        self.check(f"vkCreateBuffer of {nbytes} bytes for {label}")
        self.check(f"vkAllocateMemory of {nbytes} bytes for {label}")
        buffer = Buffer(nbytes, home, label, handle=next(self.numbers))
        visible, shared, fd = home in (*SHARED, Home.HOST), home in SHARED, None
        try:
            if shared:
                fd = os.memfd_create("vkbackend staging")
                os.ftruncate(fd, nbytes)
                buffer.host = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
            self.call("tensor", buffer.handle, nbytes // 4, visible, shared, fd=fd)
        except Timeout:
            raise
        except (VkbackendError, OSError) as error:
            # The error is mostly DeviceLost, because failed allocations crash kp.
            raise OutOfDeviceMemory(
                f"{self.name} ({self.info.name}): {nbytes} bytes for {label} could not be allocated "
                f"({error}); use a smaller context or more devices",
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
        """Raise OutOfDeviceMemory if a buffer does not fit, because kp does not report this."""
        hosts = (*SHARED, Home.HOST)
        local, every = home not in hosts, self.info.heaps
        heaps = [h for h in every if h.device_local == local] or every
        budget = max(h.budget or h.nbytes for h in heaps)
        # Logical devices of a physical device share its heaps. If there is a single heap, it serves buffers
        # of every purpose.
        twins = [other for other in _open if other.info.uuid == self.info.uuid]
        apart = len(every) > 1
        taken = sum(n for d in twins for h, n in d.nbytes.items() if not apart or (h not in hosts) == local)
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

    def build(self, recording: Recording, *, events: bool = False, timed: bool = False) -> KomputeExecutable:
        return KomputeExecutable(self, recording, timed)

    def no_longer_loading(self) -> None:
        """Forget the canary words, because executables may overwrite them."""
        self._transfers.canaries.clear()

    def commands(self, part: Iterable[Any]) -> list[Any]:
        """Return a submission's commands for the worker: (algorithm, push constants), or None for
        barriers."""
        commands: list[Any] = []
        for command in part:
            if isinstance(command, Barrier):
                # Omit a barrier at the start, because submissions run one after the other.
                if command.scope is Scope.DEVICE and commands:
                    commands.append(None)
                continue
            if isinstance(command, Copy):
                command = self._as_dispatch(command)
            views = command.bindings
            assert not command.step or command.step.offset == 0, f"{command.step} does not begin its buffer"
            handles = tuple(view.buffer.handle for view in views)
            if codebook := codebook_of(command.op, command.variant):
                handles += (self._codebook(codebook).handle,)
            if len(handles) > (most := self.info.limits["max_storage_buffers"]):
                raise UnsupportedFeature(
                    f"{self.name} ({self.info.name}): {command.op} needs {len(handles)} storage buffers with "
                    f"kompute, and a shader may bind {most} here; use the native runtime or another device"
                )
            consts = tuple(value & 0xFFFFFFFF for _, value in command.consts)
            commands.append(
                (
                    (self._module(command), consts, command.groups, handles),
                    push_constants(command, [view.offset // 4 for view in command.args]),
                )
            )
        return commands

    def _codebook(self, name: str) -> Buffer:
        if name not in self._codebooks:
            data = codebook_entries(name)
            self._codebooks[name] = buffer = self.buffer(data.nbytes, Home.WEIGHTS, f"{name} codebook")
            self.write(View(buffer, 0, (-(-data.nbytes // 4),), "u32"), data)
            self.drop_upload()
        return self._codebooks[name]

    def _as_dispatch(self, copy: Copy) -> Dispatch:
        recording = Recording("copy")
        Recorder(recording, self.limits, copy.label).copy_words(copy.src, copy.dst)
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
                self._process.kill()  # the worker process can be killed safely
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


def _limits(info: DeviceInfo) -> Limits:
    have = limits_of(info)
    nbytes = min(have.max_allocation_nbytes, have.max_storage_range, MAX_TENSOR_NBYTES)
    if env.floor():
        have = Limits.floor()
    return replace(have, max_allocation_nbytes=nbytes)
