from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vkbackend.errors import UnsupportedFeature, VkbackendError
from vkbackend.ops.spec import PUSH_NBYTES
from vkbackend.vulkan.logical_device import LogicalDevice
from vkbackend.vulkan.vk import NULL, C, ffi, lib, new


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """Descriptor set 0 has `n_args` storage buffers and `n_step` bindings of StepParams: a uniform block, and
    then a storage buffer. Set 1 exists only with a codebook."""

    n_args: int
    n_step: int
    codebook: str | None
    set_layout: Any
    pipeline_layout: Any


class Layouts:
    def __init__(self, device: LogicalDevice) -> None:
        self._device = device
        self._layouts: dict[tuple[int, int, str | None], PipelineLayout] = {}

    def get(self, n_args: int, n_step: int, codebook: str | None = None) -> PipelineLayout:
        key = n_args, n_step, codebook
        if key not in self._layouts:
            self._layouts[key] = self._make(*key)
        return self._layouts[key]

    def _make(self, n_args: int, n_step: int, codebook: str | None) -> PipelineLayout:
        device, n, most = self._device, n_args + n_step, self._device.info.limits["max_storage_buffers"]
        needed = n_args + max(0, n_step - 1) + (codebook is not None)
        if needed > most:
            raise UnsupportedFeature(
                f"{device.name} ({device.info.name}): a shader needs {needed} storage buffers, and may bind "
                f"{most} on this device; use another device"
            )
        bindings = ffi.new("VkDescriptorSetLayoutBinding[]", n)
        for i in range(n):
            bindings[i].binding, bindings[i].descriptorCount = i, 1
            bindings[i].stageFlags = C.VK_SHADER_STAGE_COMPUTE_BIT
            bindings[i].descriptorType = descriptor_type(i, n_args)
        codebook_set = self.get(1, 0).set_layout if codebook else NULL
        sets, pipes = ffi.new("VkDescriptorSetLayout *"), ffi.new("VkPipelineLayout *")
        info = new("VkDescriptorSetLayoutCreateInfo", bindingCount=n, pBindings=bindings)
        device.check(
            lib.vkCreateDescriptorSetLayout(device.vk, info, NULL, sets), "vkCreateDescriptorSetLayout"
        )
        device.made("VkDescriptorSetLayout")
        both = ffi.new("VkDescriptorSetLayout[2]", [sets[0], codebook_set])
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
        return PipelineLayout(n_args, n_step, codebook, sets[0], pipes[0])

    def close(self) -> None:
        device = self._device
        for layout in self._layouts.values():
            lib.vkDestroyPipelineLayout(device.vk, layout.pipeline_layout, NULL)
            lib.vkDestroyDescriptorSetLayout(device.vk, layout.set_layout, NULL)
            device.gone("VkPipelineLayout")
            device.gone("VkDescriptorSetLayout")
        self._layouts = {}


def descriptor_type(binding: int, n_args: int) -> int:
    storage, uniform = C.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, C.VK_DESCRIPTOR_TYPE_UNIFORM_BUFFER
    return int(uniform if binding == n_args else storage)
