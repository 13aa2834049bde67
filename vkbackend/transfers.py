"""Transfers outside of recordings: loading, tests, measurements. Each is one submission that is waited
for.

Memory that the host can map is written and read in place; the rest goes through one staging buffer, which
exists only while there is something to load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vkbackend import env
from vkbackend.buffer import Buffer, Home, View
from vkbackend.recording import HOST_HOMES
from vkbackend.vk import NULL, C, ffi, lib, new

if TYPE_CHECKING:
    from vkbackend.device import VulkanDevice

UPLOAD_NBYTES = 16 << 20


class Transfers:
    """The transfers of one device."""

    def __init__(self, device: VulkanDevice) -> None:
        self._device = device
        self._upload: Buffer | None = None

    def write(self, view: View, data: np.ndarray) -> None:
        buffer = view.buffer
        assert isinstance(buffer, Buffer) and data.nbytes <= view.nbytes < data.nbytes + 4, (
            view,
            data.nbytes,
        )
        if buffer.host is not None:
            target = buffer.host[view.offset : view.offset + data.nbytes]
            np.copyto(target.view(data.dtype).reshape(data.shape), data)
            self._device.flush(buffer)
            return
        upload = self._upload_buffer()
        flat = data.reshape(data.shape[0] if data.ndim > 1 else 1, -1)
        rows = max(1, UPLOAD_NBYTES // max(1, flat[0].nbytes)) if flat.size else 1
        offset = view.offset
        for begin in range(0, flat.shape[0], rows):
            raw = np.ascontiguousarray(flat[begin : begin + rows]).reshape(-1).view(np.uint8)
            for at in range(0, raw.size, UPLOAD_NBYTES):
                piece = raw[at : at + UPLOAD_NBYTES]
                upload.host[: piece.size] = piece
                self._device.flush(upload)
                self._copy(upload, 0, buffer, offset, piece.size)
                offset += piece.size

    def read(self, view: View) -> np.ndarray:
        buffer = view.buffer
        assert isinstance(buffer, Buffer)
        if buffer.host is not None:
            if buffer.home not in HOST_HOMES:  # recordings order the host behind writes of those homes alone
                self._once(lambda cmd: None, "read")
            self._device.invalidate(buffer)
            return np.array(buffer.host[view.offset : view.end])
        upload, out = self._upload_buffer(), np.empty(view.nbytes, np.uint8)
        for at in range(0, out.size, UPLOAD_NBYTES):
            n = min(UPLOAD_NBYTES, out.size - at)
            self._copy(buffer, view.offset + at, upload, 0, n)
            self._device.invalidate(upload)
            out[at : at + n] = upload.host[:n]
        return out

    def fill(self, view: View, word: int) -> None:
        """Fill a view with a 32-bit pattern."""
        buffer = view.buffer
        assert isinstance(buffer, Buffer)
        self._once(
            lambda cmd: lib.vkCmdFillBuffer(cmd, buffer.handle, view.offset, view.nbytes, word), "fill"
        )

    def _upload_buffer(self) -> Buffer:
        if self._upload is None:
            self._upload = self._device.buffer(UPLOAD_NBYTES, Home.STAGING, "upload")
        return self._upload

    def drop_upload(self) -> None:
        """Free the upload staging once loading is over."""
        if self._upload is not None:
            self._device.free(self._upload)
            self._upload = None

    def _copy(self, src: Buffer, src_at: int, dst: Buffer, dst_at: int, nbytes: int) -> None:
        region = ffi.new("VkBufferCopy *", {"srcOffset": src_at, "dstOffset": dst_at, "size": nbytes})
        self._once(
            lambda cmd: lib.vkCmdCopyBuffer(cmd, src.handle, dst.handle, 1, region), f"copy to {dst.label}"
        )

    def _once(self, record: Any, what: str) -> None:
        """Record, submit and wait for one command, ordered against everything before and after it."""
        command, fence = self._device.command_buffers(1), ffi.new("VkFence *")
        try:
            self._submit_once(command, fence, record, what)
        finally:
            if not self._device.abandoned:  # else both are in use for good
                if fence[0] != NULL:
                    lib.vkDestroyFence(self._device.vk, fence[0], NULL)
                    self._device.gone("VkFence")
                self._device.free_command_buffers(command, 1)

    def _submit_once(self, command: Any, fence: Any, record: Any, what: str) -> None:
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
            lib.vkQueueSubmit(self._device.vk_queue, 1, submit, fence[0]), f"vkQueueSubmit of {what}"
        )
        result = lib.vkWaitForFences(self._device.vk, 1, fence, 1, env.timeout_s() * 1_000_000_000)
        if result != C.VK_SUCCESS:
            self._device.abandoned = result == C.VK_TIMEOUT
            self._device.check(result, f"{what} within {env.timeout_s()} s")
