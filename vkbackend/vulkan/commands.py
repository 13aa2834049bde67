from __future__ import annotations

from typing import Any

from vkbackend import env
from vkbackend.buffer import Buffer, View
from vkbackend.ops.spec import PUSH_NBYTES
from vkbackend.profiling import report_order, report_times
from vkbackend.recording import Barrier, Copy, Dispatch, Recording, Scope, push_constants, submissions
from vkbackend.runtime import Executable
from vkbackend.step import BLOCK_NBYTES
from vkbackend.vulkan.logical_device import LogicalDevice
from vkbackend.vulkan.pipeline_layout import PipelineLayout, descriptor_type
from vkbackend.vulkan.program import Programs
from vkbackend.vulkan.timestamps import Timestamps
from vkbackend.vulkan.vk import NULL, C, ffi, lib, new

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
    """`parts[s]` holds the VkCommandBuffers of segment s. The queue sets `submission`. If `timed` or DEBUG=2,
    a timestamp follows every command."""

    def __init__(
        self, device: LogicalDevice, programs: Programs, recording: Recording, *, timed: bool = False
    ) -> None:
        self._device, self._programs = device, programs
        self.recording = recording
        self.submission: Any = None
        self._pool: Any = None
        self._timestamps: Timestamps | None = None
        self._buffers: list[tuple[Any, int]] = []
        dispatches = [c for c in recording.commands if isinstance(c, Dispatch)]
        try:
            pipelines = programs.pipelines(dispatches)
            self._sets = iter(self._descriptor_sets(dispatches, [layout for _, layout in pipelines]))
            self._pipelines = iter(pipelines)
            segments = [submissions(segment) for segment in recording.segments()]
            if (timed or env.debug() >= 2) and device.info.limits["timestamp_valid_bits"]:
                n = len(list(recording.accesses())) + sum(map(len, segments))
                self._timestamps = Timestamps(device, n)
            self.n_segments = len(segments)
            self.has_cuts = any(len(parts) > 1 for parts in segments)
            self.parts: list[Any] = [self._record(parts) for parts in segments]
        except BaseException:
            self.close()
            raise
        if env.debug() >= 3:
            n_barriers = sum(isinstance(c, Barrier) for c in recording.commands)
            env.log(
                3,
                f"{device.name}: {recording.name}: {len(dispatches)} dispatches, {n_barriers} barriers, "
                f"{self.n_segments} segments, {sum(map(len, segments))} submissions",
            )
            report_order(device.name, recording)

    def _descriptor_sets(self, dispatches: list[Dispatch], layouts: list[PipelineLayout]) -> list[Any]:
        device, n = self._device, len(dispatches)
        if not n:
            return []
        sizes = ffi.new("VkDescriptorPoolSize[2]")
        sizes[0].type, sizes[0].descriptorCount = (
            descriptor_type(0, 1),
            max(1, sum(len(d.bound) + d.rows for d in dispatches)),
        )
        sizes[1].type, sizes[1].descriptorCount = (
            descriptor_type(0, 0),
            max(1, sum(bool(d.step) for d in dispatches)),
        )
        pool = ffi.new("VkDescriptorPool *")
        info = new("VkDescriptorPoolCreateInfo", maxSets=n, poolSizeCount=2, pPoolSizes=sizes)
        device.check(lib.vkCreateDescriptorPool(device.vk, info, NULL, pool), "vkCreateDescriptorPool")
        device.made("VkDescriptorPool")
        self._pool = pool[0]
        set_layouts = ffi.new("VkDescriptorSetLayout[]", [layout.set_layout for layout in layouts])
        sets = ffi.new("VkDescriptorSet[]", n)
        allocate = new(
            "VkDescriptorSetAllocateInfo",
            descriptorPool=self._pool,
            descriptorSetCount=n,
            pSetLayouts=set_layouts,
        )
        device.check(lib.vkAllocateDescriptorSets(device.vk, allocate, sets), "vkAllocateDescriptorSets")
        for i, dispatch in enumerate(dispatches):
            self._write_set(sets[i], dispatch)
        return [sets[i] for i in range(n)]

    def _write_set(self, descriptor_set: Any, dispatch: Dispatch) -> None:
        views, n_args = dispatch.bindings, len(dispatch.bound)
        infos, writes = (
            ffi.new("VkDescriptorBufferInfo[]", len(views)),
            ffi.new("VkWriteDescriptorSet[]", len(views)),
        )
        for i, view in enumerate(views):
            assert isinstance(view.buffer, Buffer), f"{view} of {dispatch.op} has no address"
            base = self._base(view, uniform=i == n_args)
            infos[i].buffer, infos[i].offset = view.buffer.handle, base
            infos[i].range = BLOCK_NBYTES if i == n_args else max(4, view.end - base)
            limit = self._device.info.limits["max_storage_range"]
            assert infos[i].range <= limit, (
                f"{dispatch.label}: binding of {infos[i].range} bytes, limit {limit}"
            )
            writes[i].sType = C.VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET
            writes[i].dstSet, writes[i].dstBinding, writes[i].descriptorCount = descriptor_set, i, 1
            writes[i].descriptorType = descriptor_type(i, n_args)
            writes[i].pBufferInfo = infos + i
        lib.vkUpdateDescriptorSets(self._device.vk, len(views), writes, 0, NULL)

    def _base(self, view: View, uniform: bool = False) -> int:
        """Return the view's offset rounded down to the device's alignment, for the descriptor. The remainder
        is a push constant. The alignment is at least 16, so views at multiples of 16 remain aligned within
        the binding."""
        limits = self._device.info.limits
        align = max(limits["uniform_align" if uniform else "storage_align"], 16)
        assert not uniform or view.offset % align == 0, f"uniform view at {view.offset}, alignment {align}"
        return view.offset // align * align

    def _record(self, parts: list[list[Any]]) -> Any:
        device = self._device
        buffers = device.command_buffers(len(parts))
        self._buffers.append((buffers, len(parts)))
        for i, commands in enumerate(parts):
            device.check(
                lib.vkBeginCommandBuffer(buffers[i], new("VkCommandBufferBeginInfo")), "vkBeginCommandBuffer"
            )
            if self._timestamps:
                self._timestamps.begin(buffers[i], sum(isinstance(c, Copy | Dispatch) for c in commands))
            for command in commands:
                self._emit(buffers[i], command)
            device.check(lib.vkEndCommandBuffer(buffers[i]), "vkEndCommandBuffer")
        return _CommandBuffers(buffers, len(parts))

    def _emit(self, cmd: Any, command: Any) -> None:
        if isinstance(command, Barrier):
            source, target, source_access, target_access = masks(command)
            memory = new("VkMemoryBarrier", srcAccessMask=source_access, dstAccessMask=target_access)
            lib.vkCmdPipelineBarrier(cmd, source, target, 0, 1, memory, 0, NULL, 0, NULL)
        elif isinstance(command, Copy):
            src, dst = command.src, command.dst
            region = ffi.new(
                "VkBufferCopy *", {"srcOffset": src.offset, "dstOffset": dst.offset, "size": src.nbytes}
            )
            lib.vkCmdCopyBuffer(cmd, src.buffer.handle, dst.buffer.handle, 1, region)  # type: ignore[union-attr]
        elif isinstance(command, Dispatch):
            pipeline, layout = next(self._pipelines)
            point = C.VK_PIPELINE_BIND_POINT_COMPUTE
            lib.vkCmdBindPipeline(cmd, point, pipeline)
            sets = [next(self._sets)]
            if layout.codebook:
                sets.append(self._programs.codebooks.descriptor_set(layout.codebook))
            bound = ffi.new("VkDescriptorSet[]", sets)
            lib.vkCmdBindDescriptorSets(cmd, point, layout.pipeline_layout, 0, len(sets), bound, 0, NULL)
            push = self._push(command)
            lib.vkCmdPushConstants(
                cmd, layout.pipeline_layout, C.VK_SHADER_STAGE_COMPUTE_BIT, 0, len(push), push
            )
            lib.vkCmdDispatch(cmd, *command.groups)
        if self._timestamps and isinstance(command, Copy | Dispatch):
            self._timestamps.write(cmd, command)

    def _push(self, dispatch: Dispatch) -> bytes:
        if dispatch.addressed:
            heads = [_address(view) for view in dispatch.args]
        else:
            heads = [(view.offset - self._base(view)) // 4 for view in dispatch.args]
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
        if self._pool is not None:
            lib.vkDestroyDescriptorPool(device.vk, self._pool, NULL)
            device.gone("VkDescriptorPool")
            self._pool = None


def _address(view: View) -> int:
    assert isinstance(view.buffer, Buffer) and view.buffer.address, f"{view} has no address"
    return view.buffer.address + view.offset


class _CommandBuffers:
    """A VkCommandBuffer[n] with a length. Items are pointers, as VkSubmitInfo requires."""

    def __init__(self, array: Any, n: int) -> None:
        self._array, self._n = array, n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: int) -> Any:
        return self._array + i
