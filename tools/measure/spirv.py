"""Compiles SPIR-V of other projects, with layouts derived from the module's bindings."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vkbackend.errors import VkbackendError
from vkbackend.vulkan.pipeline_report import CAPTURE, PipelineReport, report_of
from vkbackend.vulkan.vk import FULL_SUBGROUPS, NULL, C, ffi, lib, new

if TYPE_CHECKING:
    from vkbackend.vulkan.device import VulkanDevice

MAGIC, OP_DECORATE = 0x07230203, 71
BINDING, DESCRIPTOR_SET = 33, 34  # decorations


def bindings(code: bytes) -> dict[int, set[int]]:
    """Map each descriptor set to its bindings. All bindings become storage buffers, because compute shaders
    of language models use nothing else. Drivers that only compile accept a storage buffer in place of a
    uniform block."""
    words = struct.unpack(f"<{len(code) // 4}I", code)
    if words[0] != MAGIC:
        raise VkbackendError("this is not SPIR-V: its first word is not 0x07230203")
    sets: dict[int, int] = {}
    slots: dict[int, int] = {}
    at = 5
    while at < len(words):
        size, op = words[at] >> 16, words[at] & 0xFFFF
        if op == OP_DECORATE and words[at + 2] in (BINDING, DESCRIPTOR_SET):
            (slots if words[at + 2] == BINDING else sets)[words[at + 1]] = words[at + 3]
        at += max(1, size)
    slots_of: dict[int, set[int]] = {}
    for variable, slot in slots.items():
        slots_of.setdefault(sets.get(variable, 0), set()).add(slot)
    return slots_of


def report_of_spirv(
    device: VulkanDevice, code: bytes, consts: Mapping[int, int], lanes: int = 0
) -> PipelineReport:
    """Return the driver's report on a module with these specialization constants (by id). If `lanes` is not 0
    and the device supports several subgroup sizes, subgroups have `lanes` lanes."""
    layouts, pipeline_layout = _layout(device, code)
    objects = []
    try:
        info = new(
            "VkShaderModuleCreateInfo",
            codeSize=len(code),
            pCode=ffi.cast("uint32_t *", ffi.from_buffer(code)),
        )
        module, pipeline = ffi.new("VkShaderModule *"), ffi.new("VkPipeline *")
        device.check(lib.vkCreateShaderModule(device.vk, info, NULL, module), "vkCreateShaderModule")
        objects.append(module[0])
        entries = ffi.new("VkSpecializationMapEntry[]", len(consts))
        for i, (entry, const) in enumerate(zip(entries, consts, strict=True)):
            entry.constantID, entry.offset, entry.size = const, 4 * i, 4
        data = ffi.new("uint32_t[]", list(consts.values()))
        special = new(
            "VkSpecializationInfo",
            mapEntryCount=len(consts),
            pMapEntries=entries,
            dataSize=4 * len(consts),
            pData=data,
        )
        name = ffi.new("char[]", b"main")
        create = new("VkComputePipelineCreateInfo", layout=pipeline_layout, flags=CAPTURE)
        create.stage.sType = C.VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO
        create.stage.stage, create.stage.module = C.VK_SHADER_STAGE_COMPUTE_BIT, module[0]
        create.stage.pName, create.stage.pSpecializationInfo = name, special
        size = new("VkPipelineShaderStageRequiredSubgroupSizeCreateInfo", requiredSubgroupSize=lanes)
        if lanes and device.features.get("subgroup_size_control"):
            create.stage.flags, create.stage.pNext = FULL_SUBGROUPS, size
        result = lib.vkCreateComputePipelines(device.vk, NULL, 1, create, NULL, pipeline)
        device.check(result, "vkCreateComputePipelines")
        try:
            return report_of(device, pipeline[0])
        finally:
            lib.vkDestroyPipeline(device.vk, pipeline[0], NULL)
    finally:
        for module_handle in objects:
            lib.vkDestroyShaderModule(device.vk, module_handle, NULL)
        lib.vkDestroyPipelineLayout(device.vk, pipeline_layout, NULL)
        for layout in layouts:
            lib.vkDestroyDescriptorSetLayout(device.vk, layout, NULL)


def _layout(device: VulkanDevice, code: bytes) -> tuple[list[Any], Any]:
    used = bindings(code)
    layouts = []
    for index in range(max(used, default=-1) + 1):
        slots = sorted(used.get(index, ()))
        array = ffi.new("VkDescriptorSetLayoutBinding[]", len(slots))
        for binding, slot in zip(array, slots, strict=True):
            binding.binding, binding.descriptorCount = slot, 1
            binding.stageFlags = C.VK_SHADER_STAGE_COMPUTE_BIT
            binding.descriptorType = C.VK_DESCRIPTOR_TYPE_STORAGE_BUFFER
        out = ffi.new("VkDescriptorSetLayout *")
        info = new("VkDescriptorSetLayoutCreateInfo", bindingCount=len(slots), pBindings=array)
        device.check(
            lib.vkCreateDescriptorSetLayout(device.vk, info, NULL, out), "vkCreateDescriptorSetLayout"
        )
        layouts.append(out[0])
    handles = ffi.new("VkDescriptorSetLayout[]", layouts)
    nbytes = device.info.limits["max_push_nbytes"]
    push = new("VkPushConstantRange", stageFlags=C.VK_SHADER_STAGE_COMPUTE_BIT, size=nbytes)
    info = new(
        "VkPipelineLayoutCreateInfo",
        setLayoutCount=len(layouts),
        pSetLayouts=handles,
        pushConstantRangeCount=1,
        pPushConstantRanges=push,
    )
    out = ffi.new("VkPipelineLayout *")
    device.check(lib.vkCreatePipelineLayout(device.vk, info, NULL, out), "vkCreatePipelineLayout")
    return layouts, out[0]
