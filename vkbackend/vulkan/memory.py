from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from vkbackend.buffer import IMPORTED_KIND, Buffer, Home, aligned
from vkbackend.device_info import limits_of
from vkbackend.errors import OutOfDeviceMemory, UnsupportedFeature, VkbackendError
from vkbackend.pages import HostPages, Pages
from vkbackend.vulkan import memory_types
from vkbackend.vulkan.logical_device import LogicalDevice
from vkbackend.vulkan.memory_types import CACHED, COHERENT, MAPPED, VISIBLE
from vkbackend.vulkan.vk import ADDRESS_MEMORY, ADDRESS_USAGE, NULL, WHOLE_SIZE, C, ffi, lib, new

_USAGE = (
    C.VK_BUFFER_USAGE_STORAGE_BUFFER_BIT
    | C.VK_BUFFER_USAGE_UNIFORM_BUFFER_BIT
    | C.VK_BUFFER_USAGE_INDIRECT_BUFFER_BIT
    | C.VK_BUFFER_USAGE_TRANSFER_SRC_BIT
    | C.VK_BUFFER_USAGE_TRANSFER_DST_BIT
)
_IMPORT = C.VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT


class Memory:
    """`nbytes` maps each purpose to its allocated bytes."""

    def __init__(self, device: LogicalDevice) -> None:
        self._device = device
        self.nbytes: Counter[Home] = Counter()
        # {buffer uid: (VkBuffer, VkDeviceMemory, whether the memory is coherent)}
        self._memory: dict[int, tuple[Any, Any, bool]] = {}
        self._pages: dict[int, HostPages] = {}  # of buffers of IMPORTED_KIND
        self._addresses = bool(device.features.get("buffer_address"))
        memory = ffi.new("VkPhysicalDeviceMemoryProperties *")
        lib.vkGetPhysicalDeviceMemoryProperties(device.info.physical, memory)
        self._types = [
            (memory.memoryTypes[i].propertyFlags, memory.memoryTypes[i].heapIndex)
            for i in range(memory.memoryTypeCount)
        ]

    @property
    def host_kinds(self) -> tuple[str, ...]:
        return memory_types.host_kinds(self._types)

    @property
    def has_visible(self) -> bool:
        """Return whether the host can write all memory of a device-local heap (resizable BAR)."""
        every = (1 << len(self._types)) - 1
        return bool(memory_types.suitable(self._types, every, Home.VISIBLE))

    def buffer(self, nbytes: int, home: Home, label: str, host_kind: str = "") -> Buffer:
        """Allocate a buffer, and map it if its memory is host-visible. `host_kind` is the preferred kind of
        memory for HOST. Raises OutOfDeviceMemory."""
        nbytes = aligned(nbytes)
        if host_kind == IMPORTED_KIND and (imported := self._imported(nbytes, home, label)):
            return imported
        vk_buffer, requirements = self._vk_buffer(nbytes, label, None)
        try:
            memory, kind = self._allocate(requirements, home, label, host_kind)
        except VkbackendError:
            lib.vkDestroyBuffer(self._device.vk, vk_buffer, NULL)
            self._device.gone("VkBuffer")
            raise
        flags, buffer = self._types[kind][0], Buffer(nbytes, home, label, handle=vk_buffer)
        self._memory[buffer.uid] = vk_buffer, memory, bool(flags & COHERENT) or not flags & VISIBLE
        self.nbytes[home] += nbytes
        self._bind(buffer)
        buffer.address = self._address(vk_buffer)
        if flags & VISIBLE and (home in MAPPED or self._device.features.get("device_map")):
            pointer = ffi.new("void **")
            result = lib.vkMapMemory(self._device.vk, memory, 0, WHOLE_SIZE, 0, pointer)
            if result != C.VK_SUCCESS:
                self.free(buffer)
                self._device.check(result, f"vkMapMemory for {label}")
            buffer.host = np.frombuffer(ffi.buffer(pointer[0], nbytes), np.uint8)
        return buffer

    def _imported(self, nbytes: int, home: Home, label: str) -> Buffer | None:
        """Return a buffer of new pages that the device imports, or None if the driver refuses the pages."""
        try:
            pages = HostPages(nbytes, limits_of(self._device.info).host_import_align)
            buffer = self.import_pages(pages, label, home)
        except (UnsupportedFeature, OutOfDeviceMemory):
            return None
        buffer.nbytes, buffer.host = nbytes, pages.bytes[:nbytes]
        self.nbytes[home] -= pages.nbytes - nbytes  # padding is not counted
        self._pages[buffer.uid] = pages
        return buffer

    def _allocate(self, requirements: Any, home: Home, label: str, host_kind: str = "") -> tuple[Any, int]:
        size, at_once = requirements.size, self._device.info.limits["max_allocation_nbytes"]
        kinds = memory_types.suitable(self._types, requirements.memoryTypeBits, home, host_kind)
        if not kinds:
            raise UnsupportedFeature(
                f"{self._device.name} ({self._device.info.name}): no memory type suits {label}"
            )
        refused: list[str] = []
        cause: Exception | None = None
        for kind in kinds if size <= at_once else ():
            heap = self._types[kind][1]
            if size > (has := self._device.info.heaps[heap].nbytes):
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
            f"{self._device.name} ({self._device.info.name}): {label} needs {size} bytes at once: "
            f"{', '.join(refused) or f'one allocation may take {at_once}'}; "
            "use a smaller context or more devices",
            requested=size,
            budget=self._device.info.heaps[heap].budget or self._device.info.heaps[heap].nbytes,
            heap=heap,
        ) from cause

    def _bind(self, buffer: Buffer) -> None:
        vk_buffer, memory, _ = self._memory[buffer.uid]
        result = lib.vkBindBufferMemory(self._device.vk, vk_buffer, memory, 0)
        if result != C.VK_SUCCESS:
            self.free(buffer)
            self._device.check(result, f"vkBindBufferMemory for {buffer.label}")

    def _address(self, vk_buffer: Any) -> int:
        if not self._addresses:
            return 0
        query = self._device.function("vkGetBufferDeviceAddress", promoted=True)
        return int(query(self._device.vk, new("VkBufferDeviceAddressInfo", buffer=vk_buffer)))

    def _memory_flags(self) -> Any:
        return new("VkMemoryAllocateFlagsInfo", flags=ADDRESS_MEMORY) if self._addresses else None

    def _vk_buffer(self, nbytes: int, label: str, chain: Any) -> tuple[Any, Any]:
        handle = ffi.new("VkBuffer *")
        usage = _USAGE | (ADDRESS_USAGE if self._addresses else 0)
        info = new("VkBufferCreateInfo", chain, size=nbytes, usage=usage)
        if len(families := self._device.families) > 1:
            # Background copies use a buffer on the transfer queue while steps use it on the compute queue.
            indices = ffi.new("uint32_t[]", families)
            info.sharingMode, info.queueFamilyIndexCount = C.VK_SHARING_MODE_CONCURRENT, len(families)
            info.pQueueFamilyIndices = indices
        self._device.check(
            lib.vkCreateBuffer(self._device.vk, info, NULL, handle),
            f"vkCreateBuffer of {nbytes} bytes for {label}",
        )
        self._device.made("VkBuffer")
        requirements = ffi.new("VkMemoryRequirements *")
        lib.vkGetBufferMemoryRequirements(self._device.vk, handle[0], requirements)
        return handle[0], requirements

    def _vk_memory(self, info: Any, label: str, nbytes: int, heap: int) -> Any:
        handle = ffi.new("VkDeviceMemory *")
        try:
            self._device.check(
                lib.vkAllocateMemory(self._device.vk, info, NULL, handle), f"vkAllocateMemory of {label}"
            )
        except OutOfDeviceMemory as error:
            error.requested, error.heap, error.budget = nbytes, heap, self._device.info.heaps[heap].budget
            raise
        self._device.made("VkDeviceMemory")
        return handle[0]

    def import_pages(self, pages: Pages, label: str, home: Home | None = None) -> Buffer:
        """By default, the buffer has the home of the pages. Raises UnsupportedFeature if no memory type is
        suitable."""
        device, home = self._device, home or pages.home
        properties = new("VkMemoryHostPointerPropertiesEXT")
        pointer = ffi.cast("void *", pages.address)
        query = device.function("vkGetMemoryHostPointerPropertiesEXT")
        device.check(query(device.vk, _IMPORT, pointer, properties), "vkGetMemoryHostPointerPropertiesEXT")
        external = new("VkExternalMemoryBufferCreateInfo", handleTypes=_IMPORT)
        vk_buffer, requirements = self._vk_buffer(pages.nbytes, label, external)
        try:
            allowed = requirements.memoryTypeBits & properties.memoryTypeBits
            # Memory types of imported pages must be coherent, because Vulkan can flush only memory that it
            # mapped.
            kinds = [
                i
                for i, (flags, _) in enumerate(self._types)
                if allowed >> i & 1 and flags & COHERENT and memory_types.is_plain(flags)
            ]
            if not kinds or requirements.size > pages.nbytes:
                raise UnsupportedFeature(f"{device.name}: no memory type takes these host pages")
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
            lib.vkDestroyBuffer(device.vk, vk_buffer, NULL)
            device.gone("VkBuffer")
            raise
        buffer = Buffer(pages.nbytes, home, label, handle=vk_buffer, host=pages.bytes)
        self._memory[buffer.uid] = vk_buffer, memory, True
        self.nbytes[home] += pages.nbytes
        self._bind(buffer)
        buffer.address = self._address(vk_buffer)
        return buffer

    def free(self, buffer: Buffer) -> None:
        """On an abandoned device, do nothing."""
        if self._device.abandoned:
            return
        vk_buffer, memory, _ = self._memory.pop(buffer.uid)
        buffer.host = None
        lib.vkDestroyBuffer(self._device.vk, vk_buffer, NULL)
        lib.vkFreeMemory(self._device.vk, memory, NULL)  # also unmaps the memory
        self._device.gone("VkBuffer")
        self._device.gone("VkDeviceMemory")
        self._pages.pop(buffer.uid, None)
        self.nbytes[buffer.home] -= buffer.nbytes

    def flush(self, buffer: Buffer) -> None:
        self._sync(buffer, lib.vkFlushMappedMemoryRanges, "vkFlushMappedMemoryRanges")

    def invalidate(self, buffer: Buffer) -> None:
        self._sync(buffer, lib.vkInvalidateMappedMemoryRanges, "vkInvalidateMappedMemoryRanges")

    def _sync(self, buffer: Buffer, call: Any, name: str) -> None:
        _, memory, coherent = self._memory[buffer.uid]
        if not coherent:
            whole = new("VkMappedMemoryRange", memory=memory, size=WHOLE_SIZE)
            self._device.check(call(self._device.vk, 1, whole), name)

    def is_coherent(self, buffer: Buffer) -> bool:
        return self._memory[buffer.uid][2]

    def close(self) -> None:
        for uid in list(self._memory):
            vk_buffer, memory, _ = self._memory.pop(uid)
            lib.vkDestroyBuffer(self._device.vk, vk_buffer, NULL)
            lib.vkFreeMemory(self._device.vk, memory, NULL)
            self._device.gone("VkBuffer")
            self._device.gone("VkDeviceMemory")
        self._pages.clear()
        self.nbytes.clear()
