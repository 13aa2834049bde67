from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from vkbackend import env
from vkbackend.device_info import DeviceInfo, Heap, left_of
from vkbackend.limits import plausible
from vkbackend.vulkan.cooperative import units_of
from vkbackend.vulkan.vk import (
    API_1_1,
    API_1_2,
    API_1_3,
    NULL,
    C,
    enumerate_all,
    ffi,
    lib,
    new,
    string,
)

_TYPES = {1: "integrated", 2: "discrete", 3: "virtual", 4: "cpu"}
_VENDORS = {
    0x1002: "AMD",
    0x10DE: "NVIDIA",
    0x8086: "Intel",
    0x13B5: "ARM",
    0x5143: "Qualcomm",
    0x106B: "Apple",
    0x14E4: "Broadcom",
    0x1010: "Imagination",
    0x1AE0: "Google",
    0x10005: "Mesa",
}


def extensions_of(physical: Any) -> set[str]:
    extensions = enumerate_all(
        lib.vkEnumerateDeviceExtensionProperties,
        "VkExtensionProperties",
        physical,
        NULL,
        name="vkEnumerateDeviceExtensionProperties",
    )
    return {string(p.extensionName) for p in extensions}


_NO_INDEPENDENCE = C.VK_SHADER_FLOAT_CONTROLS_INDEPENDENCE_NONE
_NEVER = 1 << 32  # No core version contains the extension.
# Property structs by this module's name: (Vulkan's name, first core version, extension for earlier versions).
_PROPERTIES = {
    "ids": ("VkPhysicalDeviceIDProperties", API_1_1, ""),
    "subgroup": ("VkPhysicalDeviceSubgroupProperties", API_1_1, ""),
    "maintenance3": ("VkPhysicalDeviceMaintenance3Properties", API_1_1, ""),
    "maintenance4": ("VkPhysicalDeviceMaintenance4Properties", API_1_3, "VK_KHR_maintenance4"),
    "driver": ("VkPhysicalDeviceDriverProperties", API_1_2, "VK_KHR_driver_properties"),
    "size_control": (
        "VkPhysicalDeviceSubgroupSizeControlProperties", API_1_3, "VK_EXT_subgroup_size_control"),
    "dots": (
        "VkPhysicalDeviceShaderIntegerDotProductProperties", API_1_3, "VK_KHR_shader_integer_dot_product"),
    "float_controls": (
        "VkPhysicalDeviceFloatControlsProperties", API_1_2, "VK_KHR_shader_float_controls"),
    "host": ("VkPhysicalDeviceExternalMemoryHostPropertiesEXT", _NEVER, "VK_EXT_external_memory_host"),
    "bus": ("VkPhysicalDevicePCIBusInfoPropertiesEXT", _NEVER, "VK_EXT_pci_bus_info"),
}  # fmt: skip


def describe(instance: Any, physical: Any, instance_version: int) -> DeviceInfo | None:
    """Return the DeviceInfo of a device, or None if it lacks Vulkan 1.1 or a compute queue."""
    base = new("VkPhysicalDeviceProperties2")
    lib.vkGetPhysicalDeviceProperties(physical, ffi.addressof(base, "properties"))
    api = min(base.properties.apiVersion, instance_version)
    if api < API_1_1 or (family := compute_family(physical)) is None:
        return None
    extensions = extensions_of(physical)
    p = _properties(physical, api, extensions)
    features = _features(physical, api, extensions)
    features |= _features_in_properties(p, features)
    properties, bus = p.base.properties, p.bus
    version, reported = properties.driverVersion, properties.apiVersion
    vendor = _VENDORS.get(properties.vendorID, f"0x{properties.vendorID:04x}")
    # Intel's matrix units need the smallest subgroup size.
    lanes = features["subgroup_min"] if vendor == "Intel" else p.subgroup.subgroupSize
    kind = _TYPES.get(properties.deviceType, "other")
    # Intel's driver ANV also reports matrix units on GPUs that lack them, and emulates them with hundreds of
    # register spills (858 on Tiger Lake). Intel GPUs with matrix units are discrete with mesh shaders, or
    # have subgroups of at least 16 lanes.
    has_units = int(lanes) > 8 or (kind == "discrete" and "VK_EXT_mesh_shader" in extensions)
    emulated = vendor == "Intel" and not has_units
    limits = _limits(p, family[1]) | {
        "subgroup_size": subgroup_size(vendor, p.subgroup.subgroupSize, features)
    }
    return DeviceInfo(
        index=-1,
        name=string(properties.deviceName),
        uuid=str(uuid.UUID(bytes=bytes(p.ids.deviceUUID))),
        driver_uuid=str(uuid.UUID(bytes=bytes(p.ids.driverUUID))),
        vendor=vendor,
        driver=string(p.driver.driverName) or "unknown",
        driver_version=string(p.driver.driverInfo) or f"0x{version:08x}",
        api=".".join(map(str, (reported >> 22, reported >> 12 & 0x3FF, reported & 0xFFF))),
        type=kind,
        pci=f"{bus.pciDomain:04x}:{bus.pciBus:02x}:{bus.pciDevice:02x}.{bus.pciFunction}"
        if "VK_EXT_pci_bus_info" in extensions
        else None,
        heaps=_heaps(physical, bool(features["memory_budget"]) and not env.without_gpu()),
        features=features,
        limits=plausible(limits),
        matrix_units=() if emulated else units_of(instance, physical, features, int(lanes)),
        physical=physical,
    )


def _properties(physical: Any, api: int, extensions: set[str]) -> SimpleNamespace:
    """Query the structs of _PROPERTIES. Return a namespace with these structs, the struct `base` that begins
    their chain, and the arguments. Structs that the driver does not know are zeros."""
    structs = {key: new(name) for key, (name, _, _) in _PROPERTIES.items()}
    structs["maintenance4"].maxBufferSize = (1 << 64) - 1  # for devices that lack the struct
    base = new("VkPhysicalDeviceProperties2")
    known = (key for key, (_, version, name) in _PROPERTIES.items() if _has(api, extensions, version, name))
    _chain(base, [structs[key] for key in known])
    lib.vkGetPhysicalDeviceProperties2(physical, base)
    return SimpleNamespace(physical=physical, extensions=extensions, base=base, **structs)


def _features_in_properties(
    p: SimpleNamespace, features: dict[str, bool | int | str]
) -> dict[str, bool | int | str]:
    """Return the features that Vulkan reports in property structs or as extensions."""
    sub, control = p.subgroup, p.size_control
    asked = control.requiredSubgroupSizeStages & C.VK_SHADER_STAGE_COMPUTE_BIT
    return {
        "device_map": _maps_device_memory(p.physical),
        "host_import": "VK_EXT_external_memory_host" in p.extensions,
        "memory_budget": "VK_EXT_memory_budget" in p.extensions,
        "subgroup_arithmetic": bool(sub.supportedOperations & C.VK_SUBGROUP_FEATURE_ARITHMETIC_BIT),
        "subgroup_shuffle": bool(sub.supportedOperations & C.VK_SUBGROUP_FEATURE_SHUFFLE_BIT),
        "subgroup_min": control.minSubgroupSize or sub.subgroupSize,
        "subgroup_max": control.maxSubgroupSize or sub.subgroupSize,
        "subgroup_size_control": bool(features["subgroup_size_control"] and asked),
        # Only usable if the mode can be set for 16-bit floats alone.
        "rte_float16": bool(p.float_controls.shaderRoundingModeRTEFloat16)
        and p.float_controls.roundingModeIndependence != _NO_INDEPENDENCE,
        "denorm_float16": bool(p.float_controls.shaderDenormPreserveFloat16)
        and p.float_controls.denormBehaviorIndependence != _NO_INDEPENDENCE,
        "int8_units_fast": has_fast_int8_units(string(p.base.properties.deviceName)),
        "int_dot_accelerated": bool(p.dots.integerDotProduct4x8BitPackedSignedAccelerated),
    }


def _limits(p: SimpleNamespace, timestamp_bits: int) -> dict[str, int]:
    limits = p.base.properties.limits
    has_period = 0 < limits.timestampPeriod < math.inf
    return {
        "max_invocations": min(limits.maxComputeWorkGroupInvocations, limits.maxComputeWorkGroupSize[0]),
        "max_shared_nbytes": limits.maxComputeSharedMemorySize,
        "max_groups_x": limits.maxComputeWorkGroupCount[0],
        "max_groups_y": limits.maxComputeWorkGroupCount[1],
        "max_groups_z": limits.maxComputeWorkGroupCount[2],
        "max_storage_range": limits.maxStorageBufferRange,
        "max_uniform_range": limits.maxUniformBufferRange,
        "max_push_nbytes": limits.maxPushConstantsSize,
        "max_storage_buffers": limits.maxPerStageDescriptorStorageBuffers,
        "max_allocation_nbytes": min(p.maintenance3.maxMemoryAllocationSize, p.maintenance4.maxBufferSize),
        "max_allocations": limits.maxMemoryAllocationCount,
        "storage_align": limits.minStorageBufferOffsetAlignment,
        "uniform_align": limits.minUniformBufferOffsetAlignment,
        "host_import_align": p.host.minImportedHostPointerAlignment,
        # Timestamps need a finite period. With RADV_FORCE_FAMILY, the reported period is infinite.
        "timestamp_valid_bits": timestamp_bits if has_period else 0,
        "timestamp_ps": round(limits.timestampPeriod * 1000) if has_period else 0,
    }


def subgroup_size(vendor: str, reported: int, features: dict[str, bool | int | str]) -> int:
    """Return the subgroup size for pipelines, if the driver offers a choice.

    Intel's driver reports 32. With 32 lanes, shaders run out of registers, so return 16 for Intel.
    """
    low, high = int(features["subgroup_min"]), int(features["subgroup_max"])
    return 16 if vendor == "Intel" and features["subgroup_size_control"] and low <= 16 <= high else reported


def has_fast_int8_units(name: str) -> bool:
    """Return whether int8 products on matrix units are faster than F16 products. On a GeForce, int8 is four
    times as fast as F16 with F32 sums. On an H100, products were 1.02 (Q4_K) to 1.45 times as fast. Only the
    device's name distinguishes the two."""
    return any(fast in name for fast in ("GeForce RTX", "H100", "H200"))


def _has(api: int, extensions: set[str], version: int, extension: str) -> bool:
    return api >= version or extension in extensions


def _chain(head: Any, structs: list[Any]) -> None:
    for struct in structs:
        head.pNext = struct
        head = struct


# Feature structs by name: (first core version, extension for earlier versions, {this module's name: field}).
_STRUCTS: dict[str, tuple[int, str, dict[str, str]]] = {
    "VkPhysicalDevice16BitStorageFeatures": (API_1_1, "", {"storage16": "storageBuffer16BitAccess"}),
    "VkPhysicalDevice8BitStorageFeatures": (
        API_1_2, "VK_KHR_8bit_storage", {"storage8": "storageBuffer8BitAccess"}),
    "VkPhysicalDeviceShaderFloat16Int8Features": (
        API_1_2, "VK_KHR_shader_float16_int8", {"float16": "shaderFloat16", "int8": "shaderInt8"}),
    "VkPhysicalDeviceTimelineSemaphoreFeatures": (
        API_1_2, "VK_KHR_timeline_semaphore", {"timeline": "timelineSemaphore"}),
    "VkPhysicalDeviceSubgroupSizeControlFeatures": (
        API_1_3, "VK_EXT_subgroup_size_control",
        {"subgroup_size_control": "subgroupSizeControl", "full_subgroups": "computeFullSubgroups"}),
    "VkPhysicalDeviceShaderIntegerDotProductFeatures": (
        API_1_3, "VK_KHR_shader_integer_dot_product", {"int_dot": "shaderIntegerDotProduct"}),
    "VkPhysicalDeviceBufferDeviceAddressFeatures": (
        API_1_2, "VK_KHR_buffer_device_address", {"buffer_address": "bufferDeviceAddress"}),
    "VkPhysicalDeviceVulkanMemoryModelFeatures": (
        API_1_2, "VK_KHR_vulkan_memory_model",
        {"memory_model": "vulkanMemoryModel", "memory_model_device": "vulkanMemoryModelDeviceScope"}),
    "VkPhysicalDeviceCooperativeMatrixFeaturesNV": (
        _NEVER, "VK_NV_cooperative_matrix", {"cooperative_matrix_nv": "cooperativeMatrix"}),
    "VkPhysicalDeviceCooperativeMatrixFeaturesKHR": (
        _NEVER, "VK_KHR_cooperative_matrix", {"cooperative_matrix": "cooperativeMatrix"}),
    "VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR": (
        _NEVER, "VK_KHR_pipeline_executable_properties", {"executable_info": "pipelineExecutableInfo"}),
}  # fmt: skip


def feature_structs(api: int, extensions: set[str]) -> dict[str, tuple[Any, dict[str, str]]]:
    """Return the feature structs that the device knows: {struct name: (struct, {this module's name:
    field})}."""
    return {
        name: (new(name), fields)
        for name, (version, extension, fields) in _STRUCTS.items()
        if _has(api, extensions, version, extension)
    }


def enabling(
    api: int, extensions: set[str], features: Mapping[str, Any]
) -> tuple[list[tuple[str, dict[str, int]]], set[str]]:
    """Return (struct name, field values) of each struct with an enabled feature. Also return the set of
    `extensions` that no enabled feature needs."""
    chain, idle = [], set()
    for name, (version, extension, fields) in _STRUCTS.items():
        values = {theirs: int(bool(features.get(ours))) for ours, theirs in fields.items()}
        if not any(values.values()):
            idle.add(extension)
        elif _has(api, extensions, version, extension):
            chain.append((name, values))
    return chain, extensions & idle


def _features(physical: Any, api: int, extensions: set[str]) -> dict[str, bool | int | str]:
    structs = feature_structs(api, extensions)
    head = new("VkPhysicalDeviceFeatures2")
    _chain(head, [struct for struct, _ in structs.values()])
    lib.vkGetPhysicalDeviceFeatures2(physical, head)
    features: dict[str, bool | int | str] = {
        ours: False for _, _, fields in _STRUCTS.values() for ours in fields
    }
    for struct, fields in structs.values():
        features |= {ours: bool(getattr(struct, theirs)) for ours, theirs in fields.items()}
    return features | {"robust_buffer_access": bool(head.features.robustBufferAccess)}


def _heaps(physical: Any, has_budget: bool) -> tuple[Heap, ...]:
    budget, memory = (
        new("VkPhysicalDeviceMemoryBudgetPropertiesEXT"),
        new("VkPhysicalDeviceMemoryProperties2"),
    )
    _chain(memory, [budget] if has_budget else [])
    lib.vkGetPhysicalDeviceMemoryProperties2(physical, memory)
    heaps = memory.memoryProperties.memoryHeaps
    return tuple(
        # Some drivers report a budget that exceeds the heap's size.
        Heap(
            heaps[i].size,
            bool(heaps[i].flags & C.VK_MEMORY_HEAP_DEVICE_LOCAL_BIT),
            min(budget.heapBudget[i], heaps[i].size),  # 0: not reported
        )
        for i in range(memory.memoryProperties.memoryHeapCount)
    )


def _maps_device_memory(physical: Any) -> bool:
    memory = ffi.new("VkPhysicalDeviceMemoryProperties *")
    lib.vkGetPhysicalDeviceMemoryProperties(physical, memory)
    both = C.VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT | C.VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT
    kinds = (memory.memoryTypes[i].propertyFlags for i in range(memory.memoryTypeCount))
    return any(flags & both == both for flags in kinds)


def free_nbytes(info: DeviceInfo) -> int | None:
    if not info.features.get("memory_budget"):
        return None
    budget = new("VkPhysicalDeviceMemoryBudgetPropertiesEXT")
    memory = new("VkPhysicalDeviceMemoryProperties2", budget)
    lib.vkGetPhysicalDeviceMemoryProperties2(info.physical, memory)
    return left_of(info.heaps, list(budget.heapBudget), list(budget.heapUsage))


def transfer_family(physical: Any) -> int | None:
    """Return the index of a copy-only queue family (with its own copy engine), or None. Engines for video and
    optical flow also copy, but slowly."""
    families = enumerate_all(
        lib.vkGetPhysicalDeviceQueueFamilyProperties,
        "VkQueueFamilyProperties",
        physical,
        name="vkGetPhysicalDeviceQueueFamilyProperties",
    )
    copies, others = C.VK_QUEUE_TRANSFER_BIT, C.VK_QUEUE_COMPUTE_BIT | C.VK_QUEUE_GRAPHICS_BIT
    others |= (
        C.VK_QUEUE_VIDEO_DECODE_BIT_KHR | C.VK_QUEUE_VIDEO_ENCODE_BIT_KHR | C.VK_QUEUE_OPTICAL_FLOW_BIT_NV
    )
    return next((i for i, f in enumerate(families) if f.queueFlags & (copies | others) == copies), None)


def compute_family(physical: Any) -> tuple[int, int] | None:
    """Return the index and valid timestamp bits of a compute queue family, preferably without graphics."""
    families = enumerate_all(
        lib.vkGetPhysicalDeviceQueueFamilyProperties,
        "VkQueueFamilyProperties",
        physical,
        name="vkGetPhysicalDeviceQueueFamilyProperties",
    )
    compute = [(i, f) for i, f in enumerate(families) if f.queueFlags & C.VK_QUEUE_COMPUTE_BIT]
    if not compute:
        return None
    index, family = min(compute, key=lambda item: bool(item[1].queueFlags & C.VK_QUEUE_GRAPHICS_BIT))
    return index, family.timestampValidBits
