"""The cache folder stores a VkPipelineCache per device and driver. Drivers do not check cached data, so
cache_folder.py checks the file, and `fits` checks the header."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

from vkbackend import cache_folder
from vkbackend.vulkan.logical_device import LogicalDevice
from vkbackend.vulkan.vk import NULL, C, ffi, lib, new

_MAX_NBYTES = 1 << 30
_HEADER = struct.Struct("<4I16s")  # The cache's size, version, vendor, device and UUID.
_VERSION_ONE = 1


class PipelineCache:
    """Several threads may use a cache at once."""

    def __init__(self, device: LogicalDevice) -> None:
        self._device, self._name = device, entry_name(device)
        self._stored = cache_folder.read(self._name, _MAX_NBYTES) or b""
        if not fits(self._stored, *_driver(device)):
            self._stored = b""
        info = new(
            "VkPipelineCacheCreateInfo",
            initialDataSize=len(self._stored),
            pInitialData=ffi.from_buffer(self._stored) if self._stored else NULL,
        )
        cache = ffi.new("VkPipelineCache *")
        device.check(lib.vkCreatePipelineCache(device.vk, info, NULL, cache), "vkCreatePipelineCache")
        device.made("VkPipelineCache")
        self.handle: Any = cache[0]

    def data(self) -> bytes:
        """Return the driver's cache data, or b"" if its header is incomplete. Mesa 26.2's lavapipe returns
        only 20 of the header's 32 bytes."""
        vk, size = self._device.vk, ffi.new("size_t *")
        if lib.vkGetPipelineCacheData(vk, self.handle, size, NULL) != C.VK_SUCCESS or not size[0]:
            return b""
        data = ffi.new("char[]", size[0])
        if lib.vkGetPipelineCacheData(vk, self.handle, size, data) != C.VK_SUCCESS:
            return b""
        body = bytes(ffi.buffer(data, size[0]))
        return body if fits(body, *_driver(self._device)) else b""

    def save(self) -> None:
        """Write the cache's entry if the data has changed. Failures are ignored."""
        body = self.data()
        if body and body != self._stored:
            cache_folder.write(self._name, body)
            self._stored = body

    def close(self) -> None:
        lib.vkDestroyPipelineCache(self._device.vk, self.handle, NULL)
        self._device.gone("VkPipelineCache")


def _driver(device: LogicalDevice) -> tuple[int, int, bytes]:
    properties = ffi.new("VkPhysicalDeviceProperties *")
    lib.vkGetPhysicalDeviceProperties(device.info.physical, properties)
    return properties.vendorID, properties.deviceID, bytes(properties.pipelineCacheUUID)


def fits(body: bytes, vendor: int, device: int, uuid: bytes) -> bool:
    """Return whether `body` begins with the header of this driver and device."""
    if len(body) < _HEADER.size:
        return False
    size, *identity = _HEADER.unpack_from(body)
    return _HEADER.size <= size <= len(body) and identity == [_VERSION_ONE, vendor, device, uuid]


def entry_name(device: LogicalDevice) -> str:
    info = device.info
    identity = repr((info.vendor, info.uuid, info.driver_uuid, info.driver_version)).encode()
    return f"pipelines-{hashlib.sha256(identity).hexdigest()[:32]}.bin"
