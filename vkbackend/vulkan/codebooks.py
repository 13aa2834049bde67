"""Codebooks of I-quants on a Vulkan device, each with a buffer and a descriptor set."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from vkbackend.buffer import Buffer, Home, View
from vkbackend.codebooks import entries
from vkbackend.transfers import Transfers
from vkbackend.vulkan.logical_device import LogicalDevice
from vkbackend.vulkan.memory import Memory
from vkbackend.vulkan.vk import NULL, C, ffi, lib, new


class Codebooks:
    def __init__(
        self, device: LogicalDevice, memory: Memory, transfers: Transfers, set_layout: Callable[[], Any]
    ) -> None:
        self._device, self._memory, self._transfers = device, memory, transfers
        self._set_layout = set_layout
        self._sets: dict[str, tuple[Any, Any, Buffer]] = {}  # Pool, descriptor set and buffer of each format.

    def descriptor_set(self, name: str) -> Any:
        if name not in self._sets:
            self._sets[name] = self._make(name)
        return self._sets[name][1]

    def _make(self, name: str) -> tuple[Any, Any, Buffer]:
        device, data = self._device, entries(name)
        with ExitStack() as undo:
            buffer = self._memory.buffer(data.nbytes, Home.WEIGHTS, f"{name} codebook")
            undo.callback(self._memory.free, buffer)
            self._transfers.write_once(View(buffer, 0, (data.nbytes // 4,), "u32"), data.view("<u4"))
            storage = C.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
            layout = ffi.new("VkDescriptorSetLayout *", self._set_layout())
            size = new("VkDescriptorPoolSize", type=storage, descriptorCount=1)
            pool = ffi.new("VkDescriptorPool *")
            info = new("VkDescriptorPoolCreateInfo", maxSets=1, poolSizeCount=1, pPoolSizes=size)
            device.check(lib.vkCreateDescriptorPool(device.vk, info, NULL, pool), "vkCreateDescriptorPool")
            device.made("VkDescriptorPool")
            undo.callback(self._destroy, pool[0])
            allocate = new(
                "VkDescriptorSetAllocateInfo",
                descriptorPool=pool[0],
                descriptorSetCount=1,
                pSetLayouts=layout,
            )
            sets = ffi.new("VkDescriptorSet *")
            device.check(lib.vkAllocateDescriptorSets(device.vk, allocate, sets), "vkAllocateDescriptorSets")
            undo.pop_all()
        where = new("VkDescriptorBufferInfo", buffer=buffer.handle, range=data.nbytes)
        write = new(
            "VkWriteDescriptorSet",
            dstSet=sets[0],
            descriptorCount=1,
            descriptorType=storage,
            pBufferInfo=where,
        )
        lib.vkUpdateDescriptorSets(device.vk, 1, write, 0, NULL)
        return pool[0], sets[0], buffer

    def _destroy(self, pool: Any) -> None:
        lib.vkDestroyDescriptorPool(self._device.vk, pool, NULL)
        self._device.gone("VkDescriptorPool")

    def close(self) -> None:
        for pool, _, buffer in self._sets.values():
            self._destroy(pool)
            self._memory.free(buffer)
        self._sets = {}
