"""A VkDevice that checks the results of Vulkan calls and counts objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from vkbackend import faults
from vkbackend.device_info import DeviceInfo
from vkbackend.errors import UnsupportedFeature
from vkbackend.vulkan.capabilities import compute_family, enabling, extensions_of, transfer_family
from vkbackend.vulkan.instance import instance
from vkbackend.vulkan.vk import API_1_2, NULL, C, check, ffi, lib, new, result_of, strings

# Extensions to enable if the device has them. Some of these extensions are core in later Vulkan versions.
_EXTENSIONS = (
    "VK_EXT_external_memory_host",
    "VK_EXT_memory_budget",
    "VK_KHR_timeline_semaphore",
    "VK_KHR_8bit_storage",
    "VK_KHR_shader_float16_int8",
    "VK_KHR_shader_float_controls",
    "VK_EXT_subgroup_size_control",
    "VK_KHR_shader_integer_dot_product",
    "VK_KHR_buffer_device_address",
    "VK_KHR_vulkan_memory_model",
    "VK_KHR_cooperative_matrix",
    "VK_NV_cooperative_matrix",
    "VK_KHR_pipeline_executable_properties",
    "VK_KHR_portability_subset",
)


class LogicalDevice:
    def __init__(self, info: DeviceInfo, name: str, features: Mapping[str, Any]) -> None:
        self.info, self.name, self.features = info, name, features
        self.counts: Counter[str] = Counter()
        self.created = 0
        self.lost = self.abandoned = False
        self.command_pool: Any = None
        self.compiled: Callable[[], None] | None = None
        self._create()

    def _create(self) -> None:
        present = extensions_of(self.info.physical)
        chain, idle = enabling(self._api_version(), present, self.features)
        wanted = [name for name in _EXTENSIONS if name in present - idle]
        self.extensions = frozenset(wanted)
        head = None
        for name, fields in chain:
            head = new(name, head, **fields)
        self.family = compute_family(self.info.physical)[0]  # type: ignore[index]
        # BackgroundCopies orders a transfer queue by timeline semaphores.
        self.transfer_family = transfer_family(self.info.physical) if self.features.get("timeline") else None
        self.families = [self.family, *([] if self.transfer_family is None else [self.transfer_family])]
        queues, priorities = (
            ffi.new("VkDeviceQueueCreateInfo[]", len(self.families)),
            ffi.new("float[]", [1.0]),
        )
        for i, family in enumerate(self.families):
            queues[i].sType = C.VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO
            queues[i].queueFamilyIndex, queues[i].queueCount = family, 1
            queues[i].pQueuePriorities = priorities
        create = new(
            "VkDeviceCreateInfo",
            head,
            queueCreateInfoCount=len(self.families),
            pQueueCreateInfos=queues,
            enabledExtensionCount=len(wanted),
            ppEnabledExtensionNames=strings(wanted),
        )
        handle = ffi.new("VkDevice *")
        self.check(lib.vkCreateDevice(self.info.physical, create, NULL, handle), "vkCreateDevice")
        self.vk = handle[0]
        self.made("VkDevice")
        self._suffix = "" if self._api_version() >= API_1_2 else "KHR"
        queue = ffi.new("VkQueue *")
        lib.vkGetDeviceQueue(self.vk, self.family, 0, queue)
        self.vk_queue = queue[0]
        lib.vkGetDeviceQueue(self.vk, self.families[-1], 0, queue)
        self.transfer_queue = queue[0]  # the compute queue if no family is for transfers

    def create_pool(self) -> None:
        pool = ffi.new("VkCommandPool *")
        info = new("VkCommandPoolCreateInfo", queueFamilyIndex=self.family)
        self.check(lib.vkCreateCommandPool(self.vk, info, NULL, pool), "vkCreateCommandPool")
        self.command_pool = pool[0]
        self.made("VkCommandPool")

    def destroy(self) -> None:
        """Destroy the command pool and the device, after all other objects."""
        if self.command_pool is not None:
            lib.vkDestroyCommandPool(self.vk, self.command_pool, NULL)
            self.gone("VkCommandPool")
        lib.vkDestroyDevice(self.vk, NULL)
        self.gone("VkDevice")

    def _api_version(self) -> int:
        major, minor, patch = map(int, self.info.api.split("."))
        return min(major << 22 | minor << 12 | patch, instance().version)

    def check(self, result: int, call: str) -> None:
        """Raise a typed error with the device's name if a call failed. If the device was lost, set `lost`."""
        if faults.planned and (injected := faults.struck(self.name, call)):
            result = result_of(injected)
        if result == C.VK_ERROR_DEVICE_LOST:
            self.lost = True
        if result != C.VK_SUCCESS:
            check(result, f"{self.name} ({self.info.name}): {call}")

    def function(self, name: str, *, promoted: bool = False) -> Any:
        """Return a device-level function. A `promoted` function is core in Vulkan 1.2 and has the suffix KHR
        in 1.1."""
        name += self._suffix if promoted else ""
        address = lib.vkGetDeviceProcAddr(self.vk, name.encode())
        if address == NULL:
            raise UnsupportedFeature(f"{self.name}: the driver has no {name}")
        return ffi.cast(f"PFN_{name}", address)

    def made(self, kind: str, n: int = 1) -> None:
        self.counts[kind] += n
        self.created += n

    def gone(self, kind: str, n: int = 1) -> None:
        self.counts[kind] -= n
        if not self.counts[kind]:
            del self.counts[kind]

    def command_buffers(self, n: int) -> Any:
        buffers = ffi.new("VkCommandBuffer[]", n)
        info = new("VkCommandBufferAllocateInfo", commandPool=self.command_pool, commandBufferCount=n)
        self.check(lib.vkAllocateCommandBuffers(self.vk, info, buffers), "vkAllocateCommandBuffers")
        self.made("VkCommandBuffer", n)
        return buffers

    def free_command_buffers(self, buffers: Any, n: int) -> None:
        lib.vkFreeCommandBuffers(self.vk, self.command_pool, n, buffers)
        self.gone("VkCommandBuffer", n)
