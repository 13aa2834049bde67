"""Copies during steps, on a transfer queue if the device has one.

No step waits for a copy: the host polls a fence, and uses the targets only after the copy has ended. On a
transfer queue, a copy waits for the steps submitted before it. When `ended` has returned True, later steps
wait for a timeline semaphore that the copy has already signalled. Without a transfer queue, copies run on the
compute queue between steps, with a barrier before and after them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vkbackend import env
from vkbackend.buffer import Buffer
from vkbackend.errors import VkbackendError
from vkbackend.recording import Copy
from vkbackend.vulkan.logical_device import LogicalDevice
from vkbackend.vulkan.queues import TimelineQueue
from vkbackend.vulkan.vk import NULL, C, ffi, lib, new

_EVERY = C.VK_ACCESS_MEMORY_READ_BIT | C.VK_ACCESS_MEMORY_WRITE_BIT
POISON = 0xFFFFFFFF


class BackgroundCopies:
    """Runs one batch of copies at a time. A batch that could not be submitted never ends. With
    VKBACKEND_POISON, targets are NaN until the first poll, so a step that reads a target too early computes
    NaN."""

    def __init__(self, device: LogicalDevice, queue: TimelineQueue | Any) -> None:
        self._device, self._queue = device, queue
        self._fence, self._pool = ffi.new("VkFence *"), ffi.new("VkCommandPool *")
        self._semaphore = ffi.new("VkSemaphore *")
        self._command: Any = None
        self._n_signalled = 0
        self._pending: Sequence[Copy] = ()  # copies to submit after their targets are poisoned
        self.busy = self._failed = False
        try:
            self._create()
        except VkbackendError:
            self.close()
            raise

    def _create(self) -> None:
        device, family = self._device, self._device.transfer_family
        info = new(
            "VkCommandPoolCreateInfo",
            flags=C.VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT,
            queueFamilyIndex=device.families[-1],
        )
        device.check(lib.vkCreateCommandPool(device.vk, info, NULL, self._pool), "vkCreateCommandPool")
        device.made("VkCommandPool")
        command = ffi.new("VkCommandBuffer *")
        allocate = new("VkCommandBufferAllocateInfo", commandPool=self._pool[0], commandBufferCount=1)
        device.check(lib.vkAllocateCommandBuffers(device.vk, allocate, command), "vkAllocateCommandBuffers")
        self._command = command
        device.check(
            lib.vkCreateFence(device.vk, new("VkFenceCreateInfo"), NULL, self._fence), "vkCreateFence"
        )
        device.made("VkFence")
        if family is not None:
            kind = new("VkSemaphoreTypeCreateInfo", semaphoreType=C.VK_SEMAPHORE_TYPE_TIMELINE)
            created = lib.vkCreateSemaphore(
                device.vk, new("VkSemaphoreCreateInfo", kind), NULL, self._semaphore
            )
            device.check(created, "vkCreateSemaphore")
            device.made("VkSemaphore")

    def begin(self, copies: Sequence[Copy]) -> None:
        """Start copies between buffers. No submitted step may read or write the targets."""
        assert not self.busy and copies
        self.busy = True
        if env.poison():
            self._pending = copies
            self._submit(_fill, copies)
        else:
            self._submit(_copy, copies)

    def ended(self) -> bool:
        """Return whether the copies have ended. Steps submitted from then on see the targets."""
        device = self._device
        if not self.busy:
            return True
        if self._failed:
            return False
        result = lib.vkGetFenceStatus(device.vk, self._fence[0])
        if result == C.VK_NOT_READY:
            return False
        device.check(result, "vkGetFenceStatus")
        device.check(lib.vkResetFences(device.vk, 1, self._fence), "vkResetFences")
        if self._pending:
            copies, self._pending = self._pending, ()
            self._submit(_copy, copies)
            return False
        if device.transfer_family is not None:
            self._make_visible()
        self.busy = False
        return True

    def _submit(self, record: Callable[[Any, Copy], None], copies: Sequence[Copy]) -> None:
        device, command = self._device, self._command
        begin = new("VkCommandBufferBeginInfo", flags=C.VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT)
        device.check(lib.vkBeginCommandBuffer(command[0], begin), "vkBeginCommandBuffer")
        _barrier(command[0])
        for copy in copies:
            record(command[0], copy)
        _barrier(command[0])
        device.check(lib.vkEndCommandBuffer(command[0]), "vkEndCommandBuffer")
        info = new("VkSubmitInfo", commandBufferCount=1, pCommandBuffers=command)
        if device.transfer_family is not None:
            # Timeline semaphores order the two queues. The steps have ended, so waiting takes little time.
            self._n_signalled += 1
            timeline = new(
                "VkTimelineSemaphoreSubmitInfo",
                waitSemaphoreValueCount=1,
                pWaitSemaphoreValues=ffi.new("uint64_t[]", [self._queue.submitted]),
                signalSemaphoreValueCount=1,
                pSignalSemaphoreValues=ffi.new("uint64_t[]", [self._n_signalled]),
            )
            info = new(
                "VkSubmitInfo",
                timeline,
                commandBufferCount=1,
                pCommandBuffers=command,
                waitSemaphoreCount=1,
                pWaitSemaphores=self._queue.done,
                pWaitDstStageMask=ffi.new("uint32_t[]", [C.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT]),
                signalSemaphoreCount=1,
                pSignalSemaphores=self._semaphore,
            )
        self._failed = True
        result = lib.vkQueueSubmit(device.transfer_queue, 1, info, self._fence[0])
        device.check(result, "vkQueueSubmit of copies")
        self._failed = False

    def _make_visible(self) -> None:
        """Make all later submissions to the compute queue wait for the signalled semaphore."""
        timeline = new(
            "VkTimelineSemaphoreSubmitInfo",
            waitSemaphoreValueCount=1,
            pWaitSemaphoreValues=ffi.new("uint64_t[]", [self._n_signalled]),
        )
        info = new(
            "VkSubmitInfo",
            timeline,
            waitSemaphoreCount=1,
            pWaitSemaphores=self._semaphore,
            pWaitDstStageMask=ffi.new("uint32_t[]", [C.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT]),
        )
        self._device.check(lib.vkQueueSubmit(self._device.vk_queue, 1, info, NULL), "vkQueueSubmit of a wait")

    def settle(self, timeout_s: float) -> bool:
        """Wait for submitted copies. Returns False on timeout."""
        if not self.busy or self._failed:
            return True
        result = lib.vkWaitForFences(self._device.vk, 1, self._fence, 1, int(timeout_s * 1e9))
        return result != C.VK_TIMEOUT

    def close(self) -> None:
        device = self._device
        if self._semaphore[0] != NULL:
            lib.vkDestroySemaphore(device.vk, self._semaphore[0], NULL)
            device.gone("VkSemaphore")
        if self._fence[0] != NULL:
            lib.vkDestroyFence(device.vk, self._fence[0], NULL)
            device.gone("VkFence")
        if self._pool[0] != NULL:
            lib.vkDestroyCommandPool(device.vk, self._pool[0], NULL)
            device.gone("VkCommandPool")


def _barrier(cmd: Any) -> None:
    memory = new("VkMemoryBarrier", srcAccessMask=_EVERY, dstAccessMask=_EVERY)
    stages = C.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT
    lib.vkCmdPipelineBarrier(cmd, stages, stages, 0, 1, memory, 0, NULL, 0, NULL)


def _copy(cmd: Any, copy: Copy) -> None:
    src, dst = copy.src, copy.dst
    assert isinstance(src.buffer, Buffer) and isinstance(dst.buffer, Buffer), copy
    region = ffi.new("VkBufferCopy *", {"srcOffset": src.offset, "dstOffset": dst.offset, "size": src.nbytes})
    lib.vkCmdCopyBuffer(cmd, src.buffer.handle, dst.buffer.handle, 1, region)


def _fill(cmd: Any, copy: Copy) -> None:
    dst = copy.dst
    assert isinstance(dst.buffer, Buffer), copy
    lib.vkCmdFillBuffer(cmd, dst.buffer.handle, dst.offset, dst.nbytes, POISON)
