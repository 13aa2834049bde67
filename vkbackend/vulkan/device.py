"""A logical Vulkan device: memory, transfers and a queue, behind the runtime seam. Every result is
checked. Long because what is made in one place is given back in the same."""

from __future__ import annotations

import mmap
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from vkbackend import env, faults, shaderlib
from vkbackend.buffer import Buffer, Home, View
from vkbackend.errors import OutOfDeviceMemory, UnsupportedFeature, VkbackendError
from vkbackend.limits import Limits, MatrixUnits
from vkbackend.memory import Pages, aligned
from vkbackend.ops import measured
from vkbackend.recording import Dispatch, Recording
from vkbackend.runtime import Device
from vkbackend.vulkan import memory_types
from vkbackend.vulkan.capabilities import (
    DeviceInfo,
    compute_family,
    extensions_of,
    feature_structs,
    free_nbytes,
    limits_of,
)
from vkbackend.vulkan.cooperative import BESIDES, FEATURES
from vkbackend.vulkan.instance import instance
from vkbackend.vulkan.memory_types import CACHED, COHERENT, MAPPED, VISIBLE
from vkbackend.vulkan.program import Programs
from vkbackend.vulkan.queues import FenceQueue, TimelineQueue
from vkbackend.vulkan.transfers import VulkanTransfers
from vkbackend.vulkan.vk import API_1_2, NULL, C, check, ffi, lib, new, result_of, strings

CLOSE_S = 5  # how long closing waits for work in flight before it leaves the device alone
_USAGE = (
    C.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT
    | C.VK_BUFFER_USAGE_UNIFORM_BUFFER_BIT
    | C.VK_BUFFER_USAGE_INDIRECT_BUFFER_BIT
    | C.VK_BUFFER_USAGE_TRANSFER_SRC_BIT
    | C.VK_BUFFER_USAGE_TRANSFER_DST_BIT
)
_ADDRESS_USAGE = 0x20000  # VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT, which the binding lacks
_ADDRESS_MEMORY = 0x2  # VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT
_WHOLE_SIZE = (1 << 64) - 1
_IMPORT = C.VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT
# Extensions worth enabling when a driver has them (some are core in newer versions: harmless to name).
_EXTENSIONS = (
    "VK_EXT_external_memory_host",
    "VK_EXT_memory_budget",
    "VK_KHR_timeline_semaphore",
    "VK_KHR_8bit_storage",
    "VK_KHR_shader_float16_int8",
    "VK_EXT_subgroup_size_control",
    "VK_KHR_shader_integer_dot_product",
    "VK_KHR_buffer_device_address",
    "VK_KHR_vulkan_memory_model",
    "VK_KHR_cooperative_matrix",
    "VK_NV_cooperative_matrix",
    "VK_KHR_pipeline_executable_properties",
    "VK_KHR_portability_subset",
)


class VulkanDevice(Device):
    """`info` opened once more as a logical device with every probed feature (less VKBACKEND_DISABLE)
    enabled. With `captures` it runs nothing, may be a driver without its GPU, and pipelines tell what was
    made of them (executables.py)."""

    def __init__(self, info: DeviceInfo, label: str = "", *, captures: bool = False) -> None:
        self.info = info
        self.name = label or f"Vulkan{info.index}"
        self.counts: Counter[str] = Counter()
        self.created = 0
        self.nbytes: Counter[Home] = Counter()
        self.lost = self.abandoned = self.closed = False
        # By the uid of buffers: VkBuffer, VkDeviceMemory, whether it is coherent.
        self._memory: dict[int, tuple[Any, Any, bool]] = {}
        self.transfers = VulkanTransfers(self)
        self.features = {k: v for k, v in info.features.items() if k not in env.disabled()}
        self.imports_pages, self.has_codebooks = bool(self.features.get("host_import")), True
        self.programs: Any = None
        self.queue: Any = None
        self.command_pool: Any = None
        self._addresses = info.is_cpu and bool(self.features.get("buffer_address"))  # GPUs bind as fast
        self.features["buffer_address"] = self._addresses
        self.features["executable_info"] = captures and bool(self.features.get("executable_info"))
        have = limits_of(info)
        self.maps_files = info.is_cpu and self.imports_pages and have.host_import_align <= mmap.PAGESIZE
        able = frozenset(name for name, value in self.features.items() if value is True)
        self.limits = replace(have, features=able, choices=tuple(measured.load(info).items()))
        units = self._matrix_units()
        self.features["memory_model"] = self.features["memory_model_device"] = bool(units)
        if units:
            self.limits = replace(self.limits, features=able | {"matrix_units"}, matrix_units=units)
        if env.floor():
            self.limits = replace(
                Limits.floor(),
                max_allocation_nbytes=have.max_allocation_nbytes,
                host_import_align=have.host_import_align,
            )
        self._create()
        try:
            self._create_pool()
            self.programs = Programs(self)
            if not captures:
                self.queue = (TimelineQueue if self.features.get("timeline") else FenceQueue)(self)
        except BaseException:
            self.close()
            raise
        env.log(
            1,
            f"{self.name}: {info.name}, {info.driver} {info.driver_version}, {self.queue.__class__.__name__}",
        )

    def _matrix_units(self) -> MatrixUnits | None:
        """The first of the device's that are not switched off."""
        if not all(self.features.get(name) for name in BESIDES):
            return None
        default, chosen = self.info.limits["subgroup_size"], self.features.get("subgroup_size_control")
        for units in self.info.matrix_units:
            if self.features.get(FEATURES[units.api]) and (chosen or units.lanes == default):
                if shaderlib.is_available("mat_mul_coop", f"f16-{units.api}"):
                    return units
                env.log(1, f"{self.name}: {units} unused, no shader for them (see tools/setup.sh)")
        return None

    def _create(self) -> None:
        present = extensions_of(self.info.physical)
        wanted = [name for name in _EXTENSIONS if name in present]
        head = None
        for name, (struct, fields) in feature_structs(self._api_version(), present).items():
            for ours, theirs in fields.items():
                setattr(struct, theirs, int(bool(self.features.get(ours))))
            head = new(name, head, **{f: getattr(struct, f) for f in fields.values()})
        self.family = compute_family(self.info.physical)[0]  # type: ignore[index]
        queues = new(
            "VkDeviceQueueCreateInfo",
            queueFamilyIndex=self.family,
            queueCount=1,
            pQueuePriorities=ffi.new("float[]", [1.0]),
        )
        create = new(
            "VkDeviceCreateInfo",
            head,
            queueCreateInfoCount=1,
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
        memory = ffi.new("VkPhysicalDeviceMemoryProperties *")
        lib.vkGetPhysicalDeviceMemoryProperties(self.info.physical, memory)
        self._types = [
            (memory.memoryTypes[i].propertyFlags, memory.memoryTypes[i].heapIndex)
            for i in range(memory.memoryTypeCount)
        ]

    def _create_pool(self) -> None:
        pool = ffi.new("VkCommandPool *")
        info = new("VkCommandPoolCreateInfo", queueFamilyIndex=self.family)
        self.check(lib.vkCreateCommandPool(self.vk, info, NULL, pool), "vkCreateCommandPool")
        self.command_pool = pool[0]
        self.made("VkCommandPool")

    def _api_version(self) -> int:
        """What both the device and the loader speak."""
        major, minor, patch = map(int, self.info.api.split("."))
        return min(major << 22 | minor << 12 | patch, instance().version)

    def check(self, result: int, what: str) -> None:
        """Raise the typed error of a failed call, naming this device; remembers a lost device."""
        if faults.planned and (injected := faults.struck(self.name, what)):
            result = result_of(injected)
        if result == C.VK_ERROR_DEVICE_LOST:
            self.lost = True
        if result != C.VK_SUCCESS:
            check(result, f"{self.name} ({self.info.name}): {what}")

    def function(self, name: str, *, promoted: bool = False) -> Any:
        """A device-level entry point; `promoted`: core since 1.2, an extension function before."""
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

    # ---- memory ----

    def buffer(self, nbytes: int, home: Home, label: str) -> Buffer:
        nbytes = aligned(nbytes)
        vk_buffer, requirements = self._vk_buffer(nbytes, label, None)
        try:
            memory, kind = self._allocate(requirements, home, label)
        except VkbackendError:
            lib.vkDestroyBuffer(self.vk, vk_buffer, NULL)
            self.gone("VkBuffer")
            raise
        flags, buffer = self._types[kind][0], Buffer(nbytes, home, label, handle=vk_buffer)
        self._memory[buffer.uid] = vk_buffer, memory, bool(flags & COHERENT) or not flags & VISIBLE
        self.nbytes[home] += nbytes
        self._bind(buffer)
        buffer.address = self._address(vk_buffer)
        if flags & VISIBLE and (home in MAPPED or self.features.get("device_map")):
            pointer = ffi.new("void **")
            result = lib.vkMapMemory(self.vk, memory, 0, _WHOLE_SIZE, 0, pointer)
            if result != C.VK_SUCCESS:
                self.free(buffer)
                self.check(result, f"vkMapMemory for {label}")
            buffer.host = np.frombuffer(ffi.buffer(pointer[0], nbytes), np.uint8)
        if env.poison():
            self.fill(View(buffer, 0, (nbytes // 4,)), 0xFFFFFFFF)
        return buffer

    def _allocate(self, requirements: Any, home: Home, label: str) -> tuple[Any, int]:
        """Memory of the best type whose heap has room for it, and that type."""
        size, at_once = requirements.size, self.info.limits["max_allocation_nbytes"]
        kinds = memory_types.suitable(self._types, requirements.memoryTypeBits, home)
        if not kinds:
            raise UnsupportedFeature(f"{self.name} ({self.info.name}): no memory type suits {label}")
        refused: list[str] = []
        cause: Exception | None = None
        for kind in kinds if size <= at_once else ():
            heap = self._types[kind][1]
            if size > (has := self.info.heaps[heap].nbytes):
                refused.append(f"heap {heap} has {has}")
                continue
            flags = self._memory_flags()
            info = new("VkMemoryAllocateInfo", flags, allocationSize=size, memoryTypeIndex=kind)
            try:
                return self._vk_memory(info, f"{size} bytes for {label}", size, heap), kind
            except OutOfDeviceMemory as error:
                refused.append(f"vkAllocateMemory found no room in heap {heap} of {has}")
                cause = error
        heap = self._types[kinds[0]][1]
        raise OutOfDeviceMemory(
            f"{self.name} ({self.info.name}): {label} needs {size} bytes at once: "
            f"{', '.join(refused) or f'one allocation may take {at_once}'}; "
            "use a smaller context or more devices",
            requested=size,
            budget=self.info.heaps[heap].budget or self.info.heaps[heap].nbytes,
            heap=heap,
        ) from cause

    def _bind(self, buffer: Buffer) -> None:
        vk_buffer, memory, _ = self._memory[buffer.uid]
        result = lib.vkBindBufferMemory(self.vk, vk_buffer, memory, 0)
        if result != C.VK_SUCCESS:
            self.free(buffer)
            self.check(result, f"vkBindBufferMemory for {buffer.label}")

    def _address(self, vk_buffer: Any) -> int:
        """Where shaders find the buffer without a binding; 0 where the device has no such addresses."""
        if not self._addresses:
            return 0
        query = self.function("vkGetBufferDeviceAddress", promoted=True)
        return int(query(self.vk, new("VkBufferDeviceAddressInfo", buffer=vk_buffer)))

    def _memory_flags(self) -> Any:
        return new("VkMemoryAllocateFlagsInfo", flags=_ADDRESS_MEMORY) if self._addresses else None

    def _vk_buffer(self, nbytes: int, label: str, chain: Any) -> tuple[Any, Any]:
        handle = ffi.new("VkBuffer *")
        usage = _USAGE | (_ADDRESS_USAGE if self._addresses else 0)
        info = new("VkBufferCreateInfo", chain, size=nbytes, usage=usage)
        self.check(
            lib.vkCreateBuffer(self.vk, info, NULL, handle), f"vkCreateBuffer of {nbytes} bytes for {label}"
        )
        self.made("VkBuffer")
        requirements = ffi.new("VkMemoryRequirements *")
        lib.vkGetBufferMemoryRequirements(self.vk, handle[0], requirements)
        return handle[0], requirements

    def _vk_memory(self, info: Any, what: str, nbytes: int, heap: int) -> Any:
        handle = ffi.new("VkDeviceMemory *")
        try:
            self.check(lib.vkAllocateMemory(self.vk, info, NULL, handle), f"vkAllocateMemory of {what}")
        except OutOfDeviceMemory as error:
            error.requested, error.heap, error.budget = nbytes, heap, self.info.heaps[heap].budget
            raise
        self.made("VkDeviceMemory")
        return handle[0]

    def free_nbytes(self) -> int | None:
        return free_nbytes(self.info) if self.features.get("memory_budget") else None

    def import_pages(self, pages: Pages, label: str) -> Buffer:
        if not self.imports_pages:
            raise UnsupportedFeature(f"{self.name} ({self.info.name}) cannot import host memory")
        properties = new("VkMemoryHostPointerPropertiesEXT")
        pointer = ffi.cast("void *", pages.address)
        query = self.function("vkGetMemoryHostPointerPropertiesEXT")
        self.check(query(self.vk, _IMPORT, pointer, properties), "vkGetMemoryHostPointerPropertiesEXT")
        external = new("VkExternalMemoryBufferCreateInfo", handleTypes=_IMPORT)
        vk_buffer, requirements = self._vk_buffer(pages.nbytes, label, external)
        try:
            allowed = requirements.memoryTypeBits & properties.memoryTypeBits
            # Coherent ones alone: the pages are never mapped through Vulkan, so nothing could flush them.
            kinds = [
                i
                for i, (flags, _) in enumerate(self._types)
                if allowed >> i & 1 and flags & COHERENT and memory_types.is_plain(flags)
            ]
            if not kinds or requirements.size > pages.nbytes:
                raise UnsupportedFeature(f"{self.name}: no memory type takes these host pages")
            kind = max(kinds, key=lambda i: bool(self._types[i][0] & CACHED))
            host = new(
                "VkImportMemoryHostPointerInfoEXT",
                self._memory_flags(),
                handleType=_IMPORT,
                pHostPointer=pointer,
            )
            info = new("VkMemoryAllocateInfo", host, allocationSize=pages.nbytes, memoryTypeIndex=kind)
            memory = self._vk_memory(info, f"imported pages for {label}", pages.nbytes, self._types[kind][1])
        except VkbackendError:
            lib.vkDestroyBuffer(self.vk, vk_buffer, NULL)
            self.gone("VkBuffer")
            raise
        buffer = Buffer(pages.nbytes, pages.home, label, handle=vk_buffer, host=pages.bytes)
        self._memory[buffer.uid] = vk_buffer, memory, True
        self.nbytes[pages.home] += pages.nbytes
        self._bind(buffer)
        buffer.address = self._address(vk_buffer)
        return buffer

    def free(self, buffer: Buffer) -> None:
        if self.abandoned:
            return
        vk_buffer, memory, _ = self._memory.pop(buffer.uid)
        buffer.host = None
        lib.vkDestroyBuffer(self.vk, vk_buffer, NULL)
        lib.vkFreeMemory(self.vk, memory, NULL)  # unmaps as well
        self.gone("VkBuffer")
        self.gone("VkDeviceMemory")
        self.nbytes[buffer.home] -= buffer.nbytes

    def flush(self, buffer: Buffer) -> None:
        self._sync(buffer, lib.vkFlushMappedMemoryRanges, "vkFlushMappedMemoryRanges")

    def invalidate(self, buffer: Buffer) -> None:
        self._sync(buffer, lib.vkInvalidateMappedMemoryRanges, "vkInvalidateMappedMemoryRanges")

    def _sync(self, buffer: Buffer, call: Any, what: str) -> None:
        _, memory, coherent = self._memory[buffer.uid]
        if not coherent:
            whole = new("VkMappedMemoryRange", memory=memory, size=_WHOLE_SIZE)
            self.check(call(self.vk, 1, whole), what)

    # ---- transfers outside of recordings ----

    def write(self, view: View, data: np.ndarray) -> None:
        self.transfers.write(view, data)

    def read(self, view: View) -> np.ndarray:
        return self.transfers.read(view)

    def fill(self, view: View, word: int) -> None:
        """Fill a view with a 32-bit pattern."""
        self.transfers.fill(view, word)

    def drop_upload(self) -> None:
        self.transfers.drop_upload()

    # ---- executables ----

    def command_buffers(self, n: int) -> Any:
        """A VkCommandBuffer[n] of this device's pool."""
        buffers = ffi.new("VkCommandBuffer[]", n)
        info = new("VkCommandBufferAllocateInfo", commandPool=self.command_pool, commandBufferCount=n)
        self.check(lib.vkAllocateCommandBuffers(self.vk, info, buffers), "vkAllocateCommandBuffers")
        self.made("VkCommandBuffer", n)
        return buffers

    def free_command_buffers(self, buffers: Any, n: int) -> None:
        lib.vkFreeCommandBuffers(self.vk, self.command_pool, n, buffers)
        self.gone("VkCommandBuffer", n)

    def compile(self, recording: Recording) -> None:
        self.programs.pipelines([c for c in recording.accesses() if isinstance(c, Dispatch)])

    def build(self, recording: Recording, *, timed: bool = False) -> Any:
        from vkbackend.vulkan.commands import VulkanExecutable

        return VulkanExecutable(self, recording, timed=timed)

    def settle(self) -> bool:
        # Not vkDeviceWaitIdle, which has no deadline.
        if self.queue is None or self.closed:
            return True
        self.queue.release()
        fence = ffi.new("VkFence *")
        if lib.vkCreateFence(self.vk, new("VkFenceCreateInfo"), NULL, fence) != C.VK_SUCCESS:
            return False
        result = lib.vkQueueSubmit(self.vk_queue, 0, NULL, fence[0])
        if result == C.VK_SUCCESS:
            result = lib.vkWaitForFences(self.vk, 1, fence, 1, CLOSE_S * 1_000_000_000)
        self.lost |= result == C.VK_ERROR_DEVICE_LOST
        if result == C.VK_TIMEOUT:
            return False
        lib.vkDestroyFence(self.vk, fence[0], NULL)
        return self.lost or result == C.VK_SUCCESS  # else nothing says that the work is over

    def close(self) -> None:
        """Release everything. A device that stopped answering is left as it is: destroying what is pending is
        invalid, and waiting for it would hang."""
        if self.closed:
            return
        self.abandoned |= not self.abandoned and not self.settle()
        self.closed = True
        if self.abandoned:
            env.log(1, f"{self.name}: abandoned with {dict(self.counts)}")
            return
        self.drop_upload()
        if self.programs is not None:
            self.programs.close()
        if self.queue is not None:
            self.queue.close()
        for uid in list(self._memory):
            vk_buffer, memory, _ = self._memory.pop(uid)
            lib.vkDestroyBuffer(self.vk, vk_buffer, NULL)
            lib.vkFreeMemory(self.vk, memory, NULL)
            self.gone("VkBuffer")
            self.gone("VkDeviceMemory")
        self.nbytes.clear()
        if self.command_pool is not None:
            lib.vkDestroyCommandPool(self.vk, self.command_pool, NULL)
            self.gone("VkCommandPool")
        lib.vkDestroyDevice(self.vk, NULL)
        self.gone("VkDevice")
