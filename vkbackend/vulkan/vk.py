"""The Vulkan binding: `ffi` and `lib` of the `vulkan` package, with helpers for results and structs.

The package's Python wrapper is not used. If a struct contains another struct, the wrapper frees the memory to
which the inner struct points. Objects from `new` keep this memory alive.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from vkbackend.errors import (
    DeviceLost,
    InvalidArgument,
    OutOfDeviceMemory,
    Timeout,
    UnsupportedFeature,
    VkbackendError,
)

try:
    from vulkan import _vulkan as C
except OSError as error:
    raise UnsupportedFeature(
        "no Vulkan loader (libvulkan.so.1) is installed, so no device can be used; "
        "install it (Debian/Ubuntu: apt-get install libvulkan1) and a driver for the GPU"
    ) from error

ffi, lib = C.ffi, C.lib
NULL = ffi.NULL
API_1_1, API_1_2, API_1_3 = (1 << 22 | minor << 12 for minor in (1, 2, 3))

# Vulkan constants that the `vulkan` package lacks.
ADDRESS_USAGE = 0x20000  # VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT.
ADDRESS_MEMORY = 0x2  # VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT.
FULL_SUBGROUPS = 0x2  # VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT.
WHOLE_SIZE = (1 << 64) - 1  # The package's VK_WHOLE_SIZE overflows.

RESULT_NAMES = {
    value: name
    for name, value in vars(C).items()
    if isinstance(value, int) and (name.startswith("VK_ERROR_") or name in ("VK_TIMEOUT", "VK_NOT_READY"))
}
_OUT_OF_MEMORY = (
    C.VK_ERROR_OUT_OF_DEVICE_MEMORY,
    C.VK_ERROR_OUT_OF_HOST_MEMORY,
    C.VK_ERROR_OUT_OF_POOL_MEMORY,
    C.VK_ERROR_FRAGMENTED_POOL,
    C.VK_ERROR_FRAGMENTATION,
    C.VK_ERROR_TOO_MANY_OBJECTS,  # more than maxMemoryAllocationCount allocations
)
_UNSUPPORTED = (
    C.VK_ERROR_EXTENSION_NOT_PRESENT,
    C.VK_ERROR_FEATURE_NOT_PRESENT,
    C.VK_ERROR_LAYER_NOT_PRESENT,
    C.VK_ERROR_INCOMPATIBLE_DRIVER,
    C.VK_ERROR_INVALID_EXTERNAL_HANDLE,  # if a driver cannot import host pages
)

# Keeps alive the memory that cffi structs point to.
_keep_alive: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

# The sType of each struct. Keys have no underscores, so VkSubmitInfo2 matches
# VK_STRUCTURE_TYPE_SUBMIT_INFO_2.
_STYPES = {
    name.removeprefix("VK_STRUCTURE_TYPE_").replace("_", ""): value
    for name, value in vars(C).items()
    if name.startswith("VK_STRUCTURE_TYPE_")
}


def check(result: int, call: str) -> None:
    """Raise a typed error if `result` is a failure. `call` names the call and the device."""
    if result == C.VK_SUCCESS:
        return
    name = RESULT_NAMES.get(result, f"VkResult {result}")
    if result == C.VK_ERROR_DEVICE_LOST:
        raise DeviceLost(
            f"{call}: the device was lost (driver reset or hang); close the model and load it again"
        )
    if result in _OUT_OF_MEMORY:
        raise OutOfDeviceMemory(f"{call}: out of memory ({name}); use a smaller context or more devices")
    if result == C.VK_TIMEOUT:
        raise Timeout(f"{call}: no answer in time")
    if result in _UNSUPPORTED:
        raise UnsupportedFeature(f"{call}: {name}")
    raise VkbackendError(f"{call}: {name}")


def result_of(name: str) -> int:
    value = getattr(C, name, None) if name.startswith("VK_") else None
    if value not in RESULT_NAMES:
        raise InvalidArgument(
            f"{name!r} is not an error of Vulkan; there are: {', '.join(RESULT_NAMES.values())}"
        )
    return int(value)


def new(struct: str, chain: Any = None, **fields: Any) -> Any:
    """Return a zeroed `struct *` with sType, pNext and `fields`, which keeps `chain` and `fields` alive."""
    pointer = ffi.new(f"{struct} *")
    names = {name for name, _ in ffi.typeof(struct).fields}
    if "sType" in names:
        pointer.sType = _STYPES[struct.removeprefix("Vk").upper()]
    if chain is not None:
        pointer.pNext = chain
    for name, value in fields.items():
        setattr(pointer, name, value)
    _keep_alive[pointer] = (chain, fields)
    return pointer


def string(chars: Any) -> str:
    return bytes(ffi.string(chars)).decode("utf-8", "replace")


def strings(names: list[str]) -> Any:
    owned = [ffi.new("char[]", name.encode()) for name in names]
    pointers = ffi.new("const char *[]", owned)
    _keep_alive[pointers] = owned
    return pointers


def enumerate_all(call: Any, ctype: str, *args: Any, name: str) -> list[Any]:
    """Return the elements of a Vulkan enumeration. `call` runs once for the count and once for the elements.
    Each element keeps the array alive."""
    count = ffi.new("uint32_t *")
    result = call(*args, count, NULL)
    if result is not None:
        check(result, name)
    values = ffi.new(f"{ctype}[]", count[0])
    if count[0]:
        result = call(*args, count, values)
        if result is not None and result != C.VK_INCOMPLETE:
            check(result, name)
    items = [values[i] for i in range(count[0])]
    for item in items:
        if isinstance(item, ffi.CData) and ffi.typeof(item).kind == "struct":
            _keep_alive[item] = values
    return items
