"""Codebooks of the I-quants on a device: the buffer that dequant_iq.glsl reads as descriptor set 1.

Constant arrays in the shaders would need no buffer, but lavapipe compiles them at 2 ms a word and fills them
anew in every invocation. The entries are the `gguf` package's.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from vkbackend import shaderlib
from vkbackend.buffer import Buffer, Home, View
from vkbackend.vulkan.vk import NULL, C, ffi, lib, new

if TYPE_CHECKING:
    from vkbackend.vulkan.device import VulkanDevice

_OWNERS = {"iq1_m": "iq1_s"}  # the format whose codebook another one has too
FORMATS = ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m")


def codebook_of(op: str, variant: str) -> str | None:
    """The format whose codebook a shader variant reads, if it reads one."""
    found = [owner for value in shaderlib.manifest()[op][variant].values() if (owner := owner_of(value))]
    return found[0] if found else None


def owner_of(dtype: str) -> str | None:
    """The format whose codebook a format reads, if it reads one."""
    return _OWNERS.get(dtype, dtype) if dtype in FORMATS else None


@cache
def entries(name: str) -> np.ndarray:
    """uint16 [entries]: 8 codes of 2 bits or 4 codes of 4 bits each, the first one lowest; a code is an index
    into the format's ascending values."""
    from gguf import quants

    kind = getattr(quants, name.upper())
    kind.init_grid()
    codes = np.searchsorted(kind.grid_map, kind.grid.reshape(kind.grid_shape)).astype(np.uint32)
    bits = 16 // codes.shape[1]
    packed = np.bitwise_or.reduce(codes << bits * np.arange(codes.shape[1], dtype=np.uint32), axis=1)
    return np.asarray(packed.astype("<u2"))


class Codebooks:
    """The codebooks of one device, each uploaded on first use and kept."""

    def __init__(self, device: VulkanDevice) -> None:
        self._device = device
        self._sets: dict[str, tuple[Any, Any, Buffer]] = {}  # pool, descriptor set, buffer

    def descriptor_set(self, name: str) -> Any:
        """The VkDescriptorSet of a format's codebook: one storage buffer."""
        if name not in self._sets:
            self._sets[name] = self._make(name)
        return self._sets[name][1]

    def _make(self, name: str) -> tuple[Any, Any, Buffer]:
        device, data = self._device, entries(name)
        with ExitStack() as undo:
            buffer = device.buffer(data.nbytes, Home.WEIGHTS, f"{name} codebook")
            undo.callback(device.free, buffer)
            device.write(View(buffer, 0, (data.nbytes // 4,), "u32"), data.view("<u4"))
            storage = C.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
            layout = ffi.new("VkDescriptorSetLayout *", device.programs.layout(1, False).set_layout)
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
            own = ffi.new("VkDescriptorSet *")
            device.check(lib.vkAllocateDescriptorSets(device.vk, allocate, own), "vkAllocateDescriptorSets")
            undo.pop_all()
        where = new("VkDescriptorBufferInfo", buffer=buffer.handle, range=data.nbytes)
        write = new(
            "VkWriteDescriptorSet",
            dstSet=own[0],
            descriptorCount=1,
            descriptorType=storage,
            pBufferInfo=where,
        )
        lib.vkUpdateDescriptorSets(device.vk, 1, write, 0, NULL)
        return pool[0], own[0], buffer

    def _destroy(self, pool: Any) -> None:
        lib.vkDestroyDescriptorPool(self._device.vk, pool, NULL)
        self._device.gone("VkDescriptorPool")

    def close(self) -> None:
        for pool, _, buffer in self._sets.values():
            self._destroy(pool)
            self._device.free(buffer)
        self._sets = {}
