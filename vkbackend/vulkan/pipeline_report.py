"""Reads the driver's statistics and disassembly of a pipeline (VK_KHR_pipeline_executable_properties). The
device must be opened with `captures`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vkbackend.vulkan.logical_device import LogicalDevice
from vkbackend.vulkan.vk import NULL, C, ffi, new, string

EXTENSION = "VK_KHR_pipeline_executable_properties"
CAPTURE = (
    C.VK_PIPELINE_CREATE_CAPTURE_STATISTICS_BIT_KHR
    | C.VK_PIPELINE_CREATE_CAPTURE_INTERNAL_REPRESENTATIONS_BIT_KHR
)
# Union members of a statistic, by VkPipelineExecutableStatisticFormatKHR.
_MEMBERS = ("b32", "i64", "u64", "f64")


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """The driver defines the names of statistics and texts."""

    subgroup_size: int
    statistics: dict[str, float]
    texts: dict[str, str]


def report_of(device: LogicalDevice, pipeline: Any) -> PipelineReport:
    info = new("VkPipelineExecutableInfoKHR", pipeline=pipeline)
    properties = _structs(device, "Properties", new("VkPipelineInfoKHR", pipeline=pipeline))
    statistics = _structs(device, "Statistics", info)
    texts = _structs(device, "InternalRepresentations", info)
    room = [ffi.new("char[]", text.dataSize + 1) for text in texts]
    for text, chars in zip(texts, room, strict=True):
        text.pData = chars
    _fill(device, "InternalRepresentations", info, ffi.new("uint32_t *", len(texts)), texts)
    return PipelineReport(
        properties[0].subgroupSize if len(properties) else 0,
        {string(s.name): float(getattr(s.value, _MEMBERS[s.format])) for s in statistics},
        {string(t.name): string(chars) for t, chars in zip(texts, room, strict=True) if t.isText},
    )


def _structs(device: LogicalDevice, suffix: str, info: Any) -> Any:
    """Call vkGetPipelineExecutable`suffix`KHR and return its structs. Their pointers are NULL."""
    count = ffi.new("uint32_t *")
    _fill(device, suffix, info, count, NULL)
    struct = f"VkPipelineExecutable{suffix if suffix == 'Properties' else suffix.removesuffix('s')}KHR"
    structs = ffi.new(f"{struct}[]", count[0])
    for i in range(count[0]):
        structs[i].sType = new(struct).sType
    _fill(device, suffix, info, count, structs)
    return structs


def _fill(device: LogicalDevice, suffix: str, info: Any, count: Any, structs: Any) -> None:
    name = f"vkGetPipelineExecutable{suffix}KHR"
    device.check(device.function(name)(device.vk, info, count, structs), name)
