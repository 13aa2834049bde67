"""Signals between the host and a running queue that cost less than semaphores: a flag and events.

At the end of a segment, a command buffer writes the segment's number to a word of host memory, which the host
polls without a call of the driver. At its beginning, a command buffer waits for an event that the host sets.
"""

from __future__ import annotations

from typing import Any

from vkbackend.buffer import Home
from vkbackend.errors import UnsupportedFeature
from vkbackend.runtime import FLAG_NBYTES
from vkbackend.vulkan.vk import NULL, C, ffi, lib, new

_HOST, _ALL = C.VK_PIPELINE_STAGE_HOST_BIT, C.VK_PIPELINE_STAGE_ALL_COMMANDS_BIT
_COPY = C.VK_PIPELINE_STAGE_TRANSFER_BIT
_COMMANDS = C.VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | _COPY
_WRITES = C.VK_ACCESS_SHADER_WRITE_BIT | C.VK_ACCESS_TRANSFER_WRITE_BIT


def _barrier(cmd: Any, source: int, written: int, target: int, used: int) -> None:
    memory = new("VkMemoryBarrier", srcAccessMask=written, dstAccessMask=used)
    lib.vkCmdPipelineBarrier(cmd, source, target, 0, 1, memory, 0, NULL, 0, NULL)


class Flag:
    """A word in coherent host memory that counts how many segments of the running executable have ended. When
    the flag counts a segment, the host may read what the segment wrote to coherent memory, because a barrier
    orders these writes before the write of the flag. Raises UnsupportedFeature without such memory."""

    def __init__(self, device: Any) -> None:
        self._buffer = device.memory.buffer(FLAG_NBYTES, Home.STAGING, "flag")
        if not device.memory.is_coherent(self._buffer):
            device.memory.free(self._buffer)
            raise UnsupportedFeature(f"{device.name} has no coherent host memory for a flag")
        self._word = memoryview(self._buffer.host).cast("I")
        self.clear()

    @property
    def count(self) -> int:
        return self._word[0]

    def clear(self) -> None:
        """No executable with a flag may be running."""
        self._word[0] = 0

    def write(self, cmd: Any, segment: int) -> None:
        """Record that segments 0 to `segment` have ended."""
        target = _COPY | _HOST, C.VK_ACCESS_TRANSFER_WRITE_BIT | C.VK_ACCESS_HOST_READ_BIT
        _barrier(cmd, _COMMANDS, _WRITES, *target)
        lib.vkCmdFillBuffer(cmd, self._buffer.handle, 0, 4, segment + 1)
        _barrier(cmd, _COPY, C.VK_ACCESS_TRANSFER_WRITE_BIT, _HOST, C.VK_ACCESS_HOST_READ_BIT)


class Events:
    """An event for each segment of the longest executable, from segment 1 on. Executables share the events,
    because one runs at a time. The host sets an event after it has submitted the wait. Newer versions of the
    specification forbid this (VUID-vkSetEvent-event-09543), so events depend on the driver."""

    def __init__(self, device: Any) -> None:
        self._device, self._events = device, list[Any]()

    def of(self, segment: int) -> Any:
        while len(self._events) < segment:
            event = ffi.new("VkEvent *")
            created = lib.vkCreateEvent(self._device.vk, new("VkEventCreateInfo"), NULL, event)
            self._device.check(created, "vkCreateEvent")
            self._device.made("VkEvent")
            self._events.append(event)
        return self._events[segment - 1]

    def wait(self, cmd: Any, segment: int) -> None:
        """Record that later commands wait until the host has set the segment's event."""
        every = C.VK_ACCESS_MEMORY_READ_BIT | C.VK_ACCESS_MEMORY_WRITE_BIT
        memory = new("VkMemoryBarrier", srcAccessMask=C.VK_ACCESS_HOST_WRITE_BIT, dstAccessMask=every)
        lib.vkCmdWaitEvents(cmd, 1, self.of(segment), _HOST, _ALL, 1, memory, 0, NULL, 0, NULL)

    def reset(self, segment: int) -> None:
        self._device.check(lib.vkResetEvent(self._device.vk, self.of(segment)[0]), "vkResetEvent")

    def set(self, segment: int) -> None:
        self._device.check(lib.vkSetEvent(self._device.vk, self.of(segment)[0]), "vkSetEvent")

    def close(self) -> None:
        for event in self._events:
            lib.vkDestroyEvent(self._device.vk, event[0], NULL)
            self._device.gone("VkEvent")
        self._events.clear()


class Ends:
    """Records the signals of an executable's segments: waiting for an event, and writing the flag."""

    def __init__(self, flag: Flag | None = None, events: Events | None = None) -> None:
        self.flag, self.events = flag, events

    def begin(self, cmd: Any, segment: int) -> None:
        if self.events and segment:
            self.events.wait(cmd, segment)

    def end(self, cmd: Any, segment: int, n_segments: int) -> None:
        """The host waits for the last segment's semaphore, so the last segment writes no flag."""
        if self.flag and segment < n_segments - 1:
            self.flag.write(cmd, segment)
