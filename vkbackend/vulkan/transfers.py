"""Transfers on a Vulkan device: submissions that the host waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vkbackend import env
from vkbackend.buffer import Buffer, View
from vkbackend.transfers import Region, Transfers
from vkbackend.vulkan.logical_device import LogicalDevice
from vkbackend.vulkan.memory import Memory
from vkbackend.vulkan.vk import NULL, C, ffi, lib, new


class VulkanTransfers(Transfers):
    def __init__(self, device: LogicalDevice, memory: Memory) -> None:
        super().__init__(memory)
        self._device = device

    def fill(self, view: View, word: int) -> None:
        buffer = view.buffer
        assert isinstance(buffer, Buffer)
        self._once(
            lambda cmd: lib.vkCmdFillBuffer(cmd, buffer.handle, view.offset, view.nbytes, word), "fill"
        )

    def _copy(self, src: Buffer, src_at: int, dst: Buffer, dst_at: int, nbytes: int) -> None:
        self._copies([(src, src_at, dst, dst_at, nbytes)])

    def _copies(self, copies: Sequence[Region]) -> None:
        def record(cmd: Any) -> None:
            for src, src_at, dst, dst_at, nbytes in copies:
                region = ffi.new("VkBufferCopy *", {"srcOffset": src_at, "dstOffset": dst_at, "size": nbytes})
                lib.vkCmdCopyBuffer(cmd, src.handle, dst.handle, 1, region)

        self._once(record, f"copy to {copies[0][2].label}")

    def _order(self) -> None:
        self._once(lambda cmd: None, "read")

    def _once(self, record: Any, call: str) -> None:
        command, fence = self._device.command_buffers(1), ffi.new("VkFence *")
        try:
            self._submit_once(command, fence, record, call)
        finally:
            if not self._device.abandoned:  # a device that does not respond may still use these objects
                if fence[0] != NULL:
                    lib.vkDestroyFence(self._device.vk, fence[0], NULL)
                    self._device.gone("VkFence")
                self._device.free_command_buffers(command, 1)

    def _submit_once(self, command: Any, fence: Any, record: Any, call: str) -> None:
        begin = new("VkCommandBufferBeginInfo", flags=C.VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT)
        self._device.check(lib.vkBeginCommandBuffer(command[0], begin), "vkBeginCommandBuffer")
        every = C.VK_ACCESS_MEMORY_READ_BIT | C.VK_ACCESS_MEMORY_WRITE_BIT
        barrier = new("VkMemoryBarrier", srcAccessMask=every, dstAccessMask=every)
        device_stages = C.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT
        both = device_stages | C.VK_PIPELINE_STAGE_HOST_BIT
        lib.vkCmdPipelineBarrier(command[0], both, device_stages, 0, 1, barrier, 0, NULL, 0, NULL)
        record(command[0])
        lib.vkCmdPipelineBarrier(command[0], device_stages, both, 0, 1, barrier, 0, NULL, 0, NULL)
        self._device.check(lib.vkEndCommandBuffer(command[0]), "vkEndCommandBuffer")
        self._device.check(
            lib.vkCreateFence(self._device.vk, new("VkFenceCreateInfo"), NULL, fence), "vkCreateFence"
        )
        self._device.made("VkFence")
        submit = new("VkSubmitInfo", commandBufferCount=1, pCommandBuffers=command)
        self._device.check(
            lib.vkQueueSubmit(self._device.vk_queue, 1, submit, fence[0]), f"vkQueueSubmit of {call}"
        )
        result = lib.vkWaitForFences(self._device.vk, 1, fence, 1, env.timeout_s() * 1_000_000_000)
        if result != C.VK_SUCCESS:
            self._device.abandoned = result == C.VK_TIMEOUT
            self._device.check(result, f"{call} within {env.timeout_s()} s")
