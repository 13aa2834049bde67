"""Copies between a device and host memory that are recorded once, on a transfer queue if the device has one.

After `follow`, the segments that the host allows next wait for the copies on the device, because the copies,
not the host, signal the semaphore `go`. Without a transfer queue, copies run on the compute queue, before all
segments that are submitted later.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from vkbackend import env
from vkbackend.buffer import Buffer
from vkbackend.errors import Timeout, VkbackendError
from vkbackend.recording import Copy
from vkbackend.runtime import RecordedCopies
from vkbackend.vulkan.queues import TimelineQueue
from vkbackend.vulkan.vk import NULL, C, ffi, lib, new

_EVERY = C.VK_ACCESS_MEMORY_READ_BIT | C.VK_ACCESS_MEMORY_WRITE_BIT
_STAGES = C.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT | C.VK_PIPELINE_STAGE_HOST_BIT
SLICE_S = 0.05  # Notice a lost device within this time.


class VulkanCopies(RecordedCopies):
    def __init__(self, device: Any, queue: TimelineQueue, copies: Sequence[Copy]) -> None:
        self._device, self._queue = device, queue
        self._pool, self._fence = ffi.new("VkCommandPool *"), ffi.new("VkFence *")
        self._command = ffi.new("VkCommandBuffer *")
        self._waited, self._signaled = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        self._stage = ffi.new("uint32_t *", C.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT)
        try:
            self._record(copies)
        except VkbackendError:
            self.close()
            raise
        self._info, self._following = self._submission(signals=False), self._submission(signals=True)

    def _record(self, copies: Sequence[Copy]) -> None:
        device, command = self._device, self._command
        info = new("VkCommandPoolCreateInfo", queueFamilyIndex=device.families[-1])
        device.check(lib.vkCreateCommandPool(device.vk, info, NULL, self._pool), "vkCreateCommandPool")
        device.made("VkCommandPool")
        device.check(
            lib.vkCreateFence(device.vk, new("VkFenceCreateInfo"), NULL, self._fence), "vkCreateFence"
        )
        device.made("VkFence")
        allocate = new("VkCommandBufferAllocateInfo", commandPool=self._pool[0], commandBufferCount=1)
        device.check(lib.vkAllocateCommandBuffers(device.vk, allocate, command), "vkAllocateCommandBuffers")
        begin = new("VkCommandBufferBeginInfo")
        device.check(lib.vkBeginCommandBuffer(command[0], begin), "vkBeginCommandBuffer")
        _barrier(command[0])
        for copy in copies:
            assert isinstance(copy.src.buffer, Buffer) and isinstance(copy.dst.buffer, Buffer), copy
            region = new(
                "VkBufferCopy", srcOffset=copy.src.offset, dstOffset=copy.dst.offset, size=copy.src.nbytes
            )
            lib.vkCmdCopyBuffer(command[0], copy.src.buffer.handle, copy.dst.buffer.handle, 1, region)
        _barrier(command[0])
        device.check(lib.vkEndCommandBuffer(command[0]), "vkEndCommandBuffer")

    def _submission(self, *, signals: bool) -> Any:
        """Return a submission that waits for the semaphore `done`, and may signal `go`. On the compute queue,
        it needs no semaphore, because submissions run in order."""
        how: dict[str, Any] = {"commandBufferCount": 1, "pCommandBuffers": self._command}
        if self._device.transfer_family is None:
            return new("VkSubmitInfo", **how)
        timeline = {"waitSemaphoreValueCount": 1, "pWaitSemaphoreValues": self._waited}
        how |= {
            "waitSemaphoreCount": 1,
            "pWaitSemaphores": self._queue.done,
            "pWaitDstStageMask": self._stage,
        }
        if signals:
            timeline |= {"signalSemaphoreValueCount": 1, "pSignalSemaphoreValues": self._signaled}
            how |= {"signalSemaphoreCount": 1, "pSignalSemaphores": self._queue.go}
        return new("VkSubmitInfo", new("VkTimelineSemaphoreSubmitInfo", **timeline), **how)

    def _submit(self, info: Any, fence: Any) -> None:
        self._waited[0] = self._queue.joined
        result = lib.vkQueueSubmit(self._device.transfer_queue, 1, info, fence)
        self._device.check(result, "vkQueueSubmit of copies")

    def begin(self) -> None:
        self._submit(self._info, self._fence[0])

    def wait(self) -> None:
        device, deadline = self._device, time.monotonic() + env.timeout_s()
        while (result := self._ended()) == C.VK_TIMEOUT:
            if time.monotonic() > deadline:
                device.abandoned = True  # the copies may still use the memory
                raise Timeout(
                    f"{device.name} did not finish copies of a sum within {env.timeout_s()} s; close the "
                    "model and load it again (VKBACKEND_TIMEOUT sets the limit in seconds)"
                )
        device.check(result, "vkWaitForFences of copies")
        device.check(lib.vkResetFences(device.vk, 1, self._fence), "vkResetFences")

    def _ended(self) -> int:
        return int(lib.vkWaitForFences(self._device.vk, 1, self._fence, 1, int(SLICE_S * 1e9)))

    def follow(self) -> None:
        if self._device.transfer_family is None:
            self._submit(self._info, NULL)
        else:
            self._queue.following = self

    def signal(self, number: int) -> None:
        """Submit the copies, which allow segment `number`."""
        self._signaled[0] = number
        self._submit(self._following, NULL)

    def close(self) -> None:
        device = self._device
        if device.abandoned:
            return
        if self._fence[0] != NULL:
            lib.vkDestroyFence(device.vk, self._fence[0], NULL)
            device.gone("VkFence")
        if self._pool[0] != NULL:
            lib.vkDestroyCommandPool(device.vk, self._pool[0], NULL)
            device.gone("VkCommandPool")


def _barrier(cmd: Any) -> None:
    """Record a barrier before or after the copies. It orders all commands, and makes writes of the device and
    of the host visible to both."""
    every = _EVERY | C.VK_ACCESS_HOST_READ_BIT | C.VK_ACCESS_HOST_WRITE_BIT
    memory = new("VkMemoryBarrier", srcAccessMask=every, dstAccessMask=every)
    lib.vkCmdPipelineBarrier(cmd, _STAGES, _STAGES, 0, 1, memory, 0, NULL, 0, NULL)
