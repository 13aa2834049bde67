"""The VkPipelineCache of a device and its file.

What the file holds is checked before a driver sees it, because drivers trust what they are given: length,
checksum, the device and driver that wrote it, and the header that Vulkan defines.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

from vkbackend import env, shaderlib
from vkbackend.vulkan.logical_device import LogicalDevice
from vkbackend.vulkan.vk import NULL, C, ffi, lib, new

_MAGIC = b"vkbackend pipeline cache 1\n"
_HEAD_NBYTES = len(_MAGIC) + 64
_MAX_NBYTES = 1 << 30  # those of whole games stay below
_HEADER = struct.Struct("<4I16s")  # size, version, vendor, device, UUID of the cache
_VERSION_ONE = 1


class PipelineCache:
    """Internally synchronised: threads may compile with it side by side."""

    def __init__(self, device: LogicalDevice) -> None:
        self._device, self._path = device, cache_path(device)
        self._stored = read_cache(self._path, _identity(device))
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
        """What the driver has to keep; b"" where that is nothing, or nothing that could be read again:
        lavapipe of Mesa 26.2 gives 20 of the 32 bytes of the header."""
        vk, size = self._device.vk, ffi.new("size_t *")
        if lib.vkGetPipelineCacheData(vk, self.handle, size, NULL) != C.VK_SUCCESS or not size[0]:
            return b""
        data = ffi.new("char[]", size[0])
        if lib.vkGetPipelineCacheData(vk, self.handle, size, data) != C.VK_SUCCESS:
            return b""
        body = bytes(ffi.buffer(data, size[0]))
        return body if fits(body, *_driver(self._device)) else b""

    def save(self) -> None:
        """Write the file if there is more to keep than it has; what keeps that from working is no error."""
        body = self.data()
        if body and body != self._stored:
            write_cache(self._path, _identity(self._device), body)
            self._stored = body

    def close(self) -> None:
        lib.vkDestroyPipelineCache(self._device.vk, self.handle, NULL)
        self._device.gone("VkPipelineCache")


def _driver(device: LogicalDevice) -> tuple[int, int, bytes]:
    """(vendor, device, UUID of its caches) as they stand in the header of its cache data."""
    properties = ffi.new("VkPhysicalDeviceProperties *")
    lib.vkGetPhysicalDeviceProperties(device.info.physical, properties)
    return properties.vendorID, properties.deviceID, bytes(properties.pipelineCacheUUID)


def fits(body: bytes, vendor: int, device: int, uuid: bytes) -> bool:
    """Whether cache data begins with the header of that driver."""
    if len(body) < _HEADER.size:
        return False
    size, *found = _HEADER.unpack_from(body)
    return _HEADER.size <= size <= len(body) and found == [_VERSION_ONE, vendor, device, uuid]


def _identity(device: LogicalDevice) -> bytes:
    info = device.info
    return hashlib.sha256(
        repr((info.vendor, info.uuid, info.driver_uuid, info.driver_version)).encode()
    ).digest()


def cache_path(device: LogicalDevice) -> Path:
    return env.cache_dir() / f"pipelines-{_identity(device).hex()[:16]}.bin"


def read_cache(path: Path, identity: bytes) -> bytes:
    """The driver's cache data from `path`, or b"" if the file is missing, damaged, too large or another
    device's."""
    try:
        if not path.is_file() or path.stat().st_size > _MAX_NBYTES:
            return b""
        blob = path.read_bytes()
    except OSError:
        return b""
    head, body = blob[:_HEAD_NBYTES], blob[_HEAD_NBYTES:]
    return body if head == _MAGIC + identity + hashlib.sha256(body).digest() else b""


def write_cache(path: Path, identity: bytes, body: bytes) -> None:
    """Replace the cache file at once, so that a reader never sees half of it; a read-only place is no
    error."""
    try:
        shaderlib.write_atomic(path, _MAGIC + identity + hashlib.sha256(body).digest() + body)
    except OSError as error:
        env.log(1, f"pipeline cache not written: {error}")
