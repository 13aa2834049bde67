from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vkbackend.errors import UnsupportedFeature, VkbackendError
from vkbackend.ops.spec import PUSH_NBYTES
from vkbackend.vulkan.logical_device import LogicalDevice
from vkbackend.vulkan.vk import NULL, C, ffi, lib, new


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """Descriptor set 0 has `n_storage` storage buffers, and StepParams if `uniform`. Set 1 exists only with a
    codebook."""

    n_storage: int
    uniform: bool
    codebook: str | None
    set_layout: Any
    pipeline_layout: Any


class Layouts:
    def __init__(self, device: LogicalDevice) -> None:
        self._device = device
        self._layouts: dict[tuple[int, bool, str | None], PipelineLayout] = {}

    def get(self, n_storage: int, uniform: bool, codebook: str | None = None) -> PipelineLayout:
        key = n_storage, uniform, codebook
        if key not in self._layouts:
            self._layouts[key] = self._make(*key)
        return self._layouts[key]

    def _make(self, n_storage: int, uniform: bool, codebook: str | None) -> PipelineLayout:
        device, n = self._device, n_storage + uniform
        needed, most = n_storage + (codebook is not None), device.info.limits["max_storage_buffers"]
        if needed > most:
            raise UnsupportedFeature(
                f"{device.name} ({device.info.name}): a shader needs {needed} storage buffers, and may bind "
                f"{most} on this device; use another device"
            )
        bindings = ffi.new("VkDescriptorSetLayoutBinding[]", n)
        for i in range(n):
            bindings[i].binding, bindings[i].descriptorCount = i, 1
            bindings[i].stageFlags = C.VK_SHADER_STAGE_COMPUTE_BIT
            bindings[i].descriptorType = descriptor_type(i, n_storage)
        beside = self.get(1, False).set_layout if codebook else NULL
        sets, pipes = ffi.new("VkDescriptorSetLayout *"), ffi.new("VkPipelineLayout *")
        info = new("VkDescriptorSetLayoutCreateInfo", bindingCount=n, pBindings=bindings)
        device.check(
            lib.vkCreateDescriptorSetLayout(device.vk, info, NULL, sets), "vkCreateDescriptorSetLayout"
        )
        device.made("VkDescriptorSetLayout")
        both = ffi.new("VkDescriptorSetLayout[2]", [sets[0], beside])
        push = new("VkPushConstantRange", stageFlags=C.VK_SHADER_STAGE_COMPUTE_BIT, size=PUSH_NBYTES)
        pipe_info = new(
            "VkPipelineLayoutCreateInfo",
            setLayoutCount=2 if codebook else 1,
            pSetLayouts=both,
            pushConstantRangeCount=1,
            pPushConstantRanges=push,
        )
        try:
            result = lib.vkCreatePipelineLayout(device.vk, pipe_info, NULL, pipes)
            device.check(result, "vkCreatePipelineLayout")
        except VkbackendError:
            lib.vkDestroyDescriptorSetLayout(device.vk, sets[0], NULL)
            device.gone("VkDescriptorSetLayout")
            raise
        device.made("VkPipelineLayout")
        return PipelineLayout(n_storage, uniform, codebook, sets[0], pipes[0])

    def close(self) -> None:
        device = self._device
        for layout in self._layouts.values():
            lib.vkDestroyPipelineLayout(device.vk, layout.pipeline_layout, NULL)
            lib.vkDestroyDescriptorSetLayout(device.vk, layout.set_layout, NULL)
            device.gone("VkPipelineLayout")
            device.gone("VkDescriptorSetLayout")
        self._layouts = {}


def descriptor_type(binding: int, n_storage: int) -> int:
    storage, uniform = C.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, C.VK_DESCRIPTOR_TYPE_UNIFORM_BUFFER
    return int(storage if binding < n_storage else uniform)
