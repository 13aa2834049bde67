"""Timestamps of an executable (DEBUG=2). A timestamp after a command waits for all earlier work, and commands
may overlap. So a command's time is the difference from the previous timestamp."""

from __future__ import annotations

from typing import Any

import numpy as np

from vkbackend.recording import Copy, Dispatch
from vkbackend.vulkan.logical_device import LogicalDevice
from vkbackend.vulkan.vk import NULL, C, ffi, lib, new


class Timestamps:
    def __init__(self, device: LogicalDevice, n: int) -> None:
        self._device, self._n = device, n
        # The command before each timestamp, or None at a submission's start.
        self._commands: list[Dispatch | Copy | None] = []
        pool = ffi.new("VkQueryPool *")
        info = new("VkQueryPoolCreateInfo", queryType=C.VK_QUERY_TYPE_TIMESTAMP, queryCount=n)
        device.check(lib.vkCreateQueryPool(device.vk, info, NULL, pool), "vkCreateQueryPool")
        device.made("VkQueryPool")
        self._pool = pool[0]

    def begin(self, cmd: Any, n_commands: int) -> None:
        lib.vkCmdResetQueryPool(cmd, self._pool, len(self._commands), n_commands + 1)
        self.write(cmd, None)

    def write(self, cmd: Any, command: Dispatch | Copy | None) -> None:
        lib.vkCmdWriteTimestamp(cmd, C.VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT, self._pool, len(self._commands))
        self._commands.append(command)

    def durations(self) -> list[tuple[Dispatch | Copy, float]]:
        device, n = self._device, len(self._commands)
        ticks = np.zeros(n, np.uint64)
        flags = C.VK_QUERY_RESULT_64_BIT | C.VK_QUERY_RESULT_WAIT_BIT
        result = lib.vkGetQueryPoolResults(
            device.vk, self._pool, 0, n, ticks.nbytes, ffi.from_buffer(ticks), 8, flags
        )
        device.check(result, "vkGetQueryPoolResults")
        bits = device.info.limits["timestamp_valid_bits"]
        passed = intervals(ticks, bits)
        us = device.info.limits["timestamp_ps"] / 1e6
        return [(c, float(passed[i]) * us) for i, c in enumerate(self._commands) if c is not None]

    def close(self) -> None:
        lib.vkDestroyQueryPool(self._device.vk, self._pool, NULL)
        self._device.gone("VkQueryPool")


def intervals(ticks: np.ndarray, bits: int) -> np.ndarray:
    """Return the ticks between timestamps of a `bits`-bit counter that may wrap. The first value is
    meaningless."""
    return (ticks - np.roll(ticks, 1)) & np.uint64((1 << bits) - 1)
