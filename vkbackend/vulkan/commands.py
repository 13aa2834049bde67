from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vkbackend import env
from vkbackend.buffer import Buffer, View
from vkbackend.ops.spec import PUSH_NBYTES
from vkbackend.profiling import report_order, report_times
from vkbackend.recording import (
    Barrier,
    Command,
    Copy,
    Cut,
    Dispatch,
    Exchange,
    Recording,
    Scope,
    push_constants,
)
from vkbackend.repeats import Repeat, RepeatingRecording, moved
from vkbackend.runtime import Executable
from vkbackend.vulkan.descriptors import DescriptorSets, Use, base_of
from vkbackend.vulkan.logical_device import LogicalDevice
from vkbackend.vulkan.program import Programs
from vkbackend.vulkan.signals import Ends
from vkbackend.vulkan.timestamps import Timestamps
from vkbackend.vulkan.vk import NULL, C, ffi, lib, new

# Records use i of a command into a command buffer: use 0 is the command, and use i + 1 is its repeat i.
Emit = Callable[[Any, int], None]
_SHADER = C.VK_ACCESS_SHADER_READ_BIT | C.VK_ACCESS_SHADER_WRITE_BIT | C.VK_ACCESS_UNIFORM_READ_BIT
_TRANSFER = C.VK_ACCESS_TRANSFER_READ_BIT | C.VK_ACCESS_TRANSFER_WRITE_BIT
_COMPUTE, _COPY = C.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, C.VK_PIPELINE_STAGE_TRANSFER_BIT
_HOST = C.VK_PIPELINE_STAGE_HOST_BIT


def masks(barrier: Barrier) -> tuple[int, int, int, int]:
    source, target = _COMPUTE, _COMPUTE
    source_access, target_access = C.VK_ACCESS_SHADER_WRITE_BIT, _SHADER
    if barrier.after_copies:
        source, source_access = source | _COPY, source_access | C.VK_ACCESS_TRANSFER_WRITE_BIT
    if barrier.before_copies:
        target, target_access = target | _COPY, target_access | _TRANSFER
    if barrier.scope is Scope.FROM_HOST:
        source, source_access = source | _HOST, source_access | C.VK_ACCESS_HOST_WRITE_BIT
    elif barrier.scope is Scope.TO_HOST:
        target, target_access = _HOST, C.VK_ACCESS_HOST_READ_BIT
    return source, target, source_access, target_access


class VulkanExecutable(Executable):
    """`parts[s]` holds the VkCommandBuffers of segment s. The queue gives `ends` and sets `submission`. If
    `timed` or DEBUG=2, a timestamp follows every command."""

    def __init__(
        self,
        device: LogicalDevice,
        programs: Programs,
        recording: Recording,
        *,
        timed: bool = False,
        ends: Ends | None = None,
    ) -> None:
        self._device, self._programs = device, programs
        self.ends = ends or Ends()
        self.recording = recording
        self.submission: Any = None
        self._sets: DescriptorSets | None = None
        self._timestamps: Timestamps | None = None
        self._buffers: list[tuple[Any, int]] = []
        timed = bool((timed or env.debug() >= 2) and device.info.limits["timestamp_valid_bits"])
        repeats: tuple[Repeat, ...] = ()
        stored = recording.commands if timed else recording.stored
        if isinstance(recording, RepeatingRecording) and not timed:
            repeats = recording.repeats
        try:
            uses = self._uses(stored, repeats)
            self._sets = DescriptorSets(device, list(uses.values()))
            firsts = dict(zip(uses, self._sets.firsts, strict=True))
            self._emits = [
                self._dispatching(uses[at], firsts[at])
                if at in uses
                else self._emitting(command, at, repeats)
                for at, command in enumerate(stored)
            ]
            segments = _submissions(recording, stored, repeats)
            if timed:
                n = len(list(recording.accesses())) + sum(map(len, segments))
                self._timestamps = Timestamps(device, n)
            self.n_segments = len(segments)
            self.parts: list[Any] = [self._record(s, parts, stored) for s, parts in enumerate(segments)]
        except BaseException:
            self.close()
            raise
        del self._emits
        if env.debug() >= 3:
            commands = recording.commands
            n_dispatches, n_barriers = (sum(isinstance(c, k) for c in commands) for k in (Dispatch, Barrier))
            env.log(
                3,
                f"{device.name}: {recording.name}: {n_dispatches} dispatches, {n_barriers} barriers, "
                f"{self.n_segments} segments, {sum(map(len, segments))} submissions",
            )
            report_order(device.name, recording)

    def _uses(self, stored: Sequence[Command], repeats: Sequence[Repeat]) -> dict[int, Use]:
        """Map the index in `stored` of each dispatch to its uses: the dispatch and its repeats."""
        dispatches = {at: c for at, c in enumerate(stored) if isinstance(c, Dispatch)}
        pipelines = self._programs.pipelines(list(dispatches.values()))
        uses = {
            at: Use(dispatch, *how) for (at, dispatch), how in zip(dispatches.items(), pipelines, strict=True)
        }
        for repeat in repeats:
            for at in range(repeat.begin, repeat.end):
                if at in uses:
                    places = {
                        arg: p
                        for arg in range(len(uses[at].dispatch.args))
                        if (p := repeat.moves.get((at, arg)))
                    }
                    uses[at] = replace(uses[at], n=1 + repeat.n, places=places)
        return uses

    def _dispatching(self, use: Use, first: int) -> Emit:
        """Return a function that records use i of a dispatch into a command buffer."""
        dispatch, layout, point = use.dispatch, use.layout.pipeline_layout, C.VK_PIPELINE_BIND_POINT_COMPUTE
        stage, pipeline, groups, pushes = (
            C.VK_SHADER_STAGE_COMPUTE_BIT,
            use.pipeline,
            dispatch.groups,
            self._pushes(use),
        )
        assert self._sets
        sets, n_sets = self._sets.sets + first, 1
        if use.layout.codebook:
            codebook, n_sets = self._programs.codebooks.descriptor_set(use.layout.codebook), 2
            sets = ffi.new("VkDescriptorSet[]", [s for i in range(use.n) for s in (sets[i], codebook)])
        bind, bind_sets = lib.vkCmdBindPipeline, lib.vkCmdBindDescriptorSets
        push_constants_, n_push, run = lib.vkCmdPushConstants, len(pushes[0]), lib.vkCmdDispatch

        def emit(cmd: Any, i: int) -> None:
            bind(cmd, point, pipeline)
            bind_sets(cmd, point, layout, 0, n_sets, sets + n_sets * i, 0, NULL)
            push_constants_(cmd, layout, stage, 0, n_push, pushes[i % len(pushes)])
            run(cmd, *groups)

        return emit

    def _emitting(self, command: Command, at: int, repeats: Sequence[Repeat]) -> Emit:
        if isinstance(command, Barrier):
            source, target, source_access, target_access = masks(command)
            memory = new("VkMemoryBarrier", srcAccessMask=source_access, dstAccessMask=target_access)
            how = source, target, 0, 1, memory, 0, NULL, 0, NULL
            return lambda cmd, i: lib.vkCmdPipelineBarrier(cmd, *how)
        copies = [command] if isinstance(command, Copy) else []
        for repeat in repeats:
            if copies and repeat.begin <= at < repeat.end:
                copies += [repeat.command(command, at, i) for i in range(repeat.n)]  # type: ignore[misc]
        regions = [_region(copy) for copy in copies]
        return lambda cmd, i: lib.vkCmdCopyBuffer(cmd, *regions[i])

    def _record(self, s: int, parts: Sequence[Sequence[tuple[int, int]]], stored: Sequence[Command]) -> Any:
        """Record the submissions of segment s. A submission is a list of (index in `stored`, number of the
        use)."""
        device, emits = self._device, self._emits
        buffers = device.command_buffers(len(parts))
        self._buffers.append((buffers, len(parts)))
        info = new("VkCommandBufferBeginInfo")
        for p, (cmd, part) in enumerate(zip(buffers, parts, strict=True)):
            device.check(lib.vkBeginCommandBuffer(cmd, info), "vkBeginCommandBuffer")
            if not p:
                self.ends.begin(cmd, s)
            if self._timestamps:
                self._timestamps.begin(cmd, sum(isinstance(stored[at], Copy | Dispatch) for at, _ in part))
            for at, i in part:
                emits[at](cmd, i)
                if self._timestamps and isinstance(command := stored[at], Copy | Dispatch):
                    self._timestamps.write(cmd, command)
            if p == len(parts) - 1:
                self.ends.end(cmd, s, self.n_segments)
            device.check(lib.vkEndCommandBuffer(cmd), "vkEndCommandBuffer")
        return _CommandBuffers(buffers, len(parts))

    def _pushes(self, use: Use) -> list[bytes]:
        """Return the push constants of each use, or only one element if they are equal."""
        dispatch = use.dispatch
        if not dispatch.addressed:
            return [self._push(dispatch, [(v.offset - base_of(self._device, v)) // 4 for v in dispatch.args])]
        addresses = np.array([[_address(view) for view in dispatch.args]] * use.n, np.uint64)
        for arg, places in use.places.items():
            view = dispatch.args[arg]
            addresses[1:, arg] = [_address(moved(view, places.base, to)) for to in places.views]
        return [self._push(dispatch, row) for row in addresses.tolist()]

    def _push(self, dispatch: Dispatch, heads: Sequence[int]) -> bytes:
        words = push_constants(dispatch, heads)
        assert len(words) <= PUSH_NBYTES, f"{dispatch.op}: {len(words)} bytes of push constants"
        return words

    def report(self) -> None:
        if self._timestamps:
            report_times(self._device.name, self._timestamps.durations())

    def durations(self) -> list[tuple[Dispatch | Copy, float]]:
        assert self._timestamps is not None, "built without timestamps"
        return self._timestamps.durations()

    def close(self) -> None:
        device = self._device
        if device.abandoned:
            return
        if self._timestamps:
            self._timestamps.close()
            self._timestamps = None
        for buffers, n in self._buffers:
            device.free_command_buffers(buffers, n)
        self._buffers = []
        if self._sets:
            self._sets.close()


def _address(view: View) -> int:
    assert isinstance(view.buffer, Buffer) and view.buffer.address, f"{view} has no address"
    return view.buffer.address + view.offset


def _region(copy: Copy) -> tuple[Any, Any, int, Any]:
    src, dst = copy.src, copy.dst
    region = new("VkBufferCopy", srcOffset=src.offset, dstOffset=dst.offset, size=src.nbytes)
    return src.buffer.handle, dst.buffer.handle, 1, region  # type: ignore[union-attr]


def _submissions(
    recording: Recording, stored: Sequence[Command], repeats: Sequence[Repeat]
) -> list[list[list[tuple[int, int]]]]:
    """Return lists [segment][submission] of commands as (index in `stored`, number of the use)."""
    order: Iterable[tuple[int, int]] = ((at, 0) for at in range(len(stored)))
    cuts: Collection[int] = ()
    if repeats:
        assert isinstance(recording, RepeatingRecording)
        order = ((at, i + 1 if repeat else 0) for at, repeat, i in recording.order())
        cuts = recording.cuts
    segments: list[list[list[tuple[int, int]]]] = [[[]]]
    for position, use in enumerate(order):
        command = stored[use[0]]
        if isinstance(command, Exchange):
            segments.append([[]])
        elif isinstance(command, Cut):
            segments[-1].append([])
        else:
            if position in cuts:
                segments[-1].append([])
            segments[-1][-1].append(use)
    return segments


class _CommandBuffers:
    """A VkCommandBuffer[n] with a length. Items are pointers, as VkSubmitInfo requires."""

    def __init__(self, array: Any, n: int) -> None:
        self._array, self._n = array, n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: int) -> Any:
        return self._array + i
