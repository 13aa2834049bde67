"""Matrix units of a physical device: which sizes of matrices its subgroups multiply, halves by halves with
sums in f32, as VK_KHR_cooperative_matrix and VK_NV_cooperative_matrix report them."""

from __future__ import annotations

from typing import Any

from vkbackend.limits import MatrixUnits
from vkbackend.ops.units import usable
from vkbackend.vulkan.vk import NULL, C, enumerate_all, ffi, lib

_F16, _F32, _SUBGROUP = 0, 1, 3  # VkComponentTypeKHR, VkScopeKHR; the same numbers in both extensions
# Other features that matrix units need. If the memory model is enabled, atomics in all shaders need its
# device scope.
BESIDES = ("float16", "memory_model", "memory_model_device")
FEATURES = {"khr": "cooperative_matrix", "nv": "cooperative_matrix_nv"}  # by extension, the better one first


def _sizes(instance: Any, physical: Any, suffix: str) -> list[tuple[int, int, int]]:
    """(m, n, k) of every kind of product of halves that sums in f32 within a subgroup."""
    name = f"vkGetPhysicalDeviceCooperativeMatrixProperties{suffix}"
    struct = f"VkCooperativeMatrixProperties{suffix}"
    address = lib.vkGetInstanceProcAddr(instance, name.encode())
    if address == NULL:
        return []
    query = ffi.cast(f"PFN_{name}", address)

    def typed(physical: Any, count: Any, values: Any) -> int:
        for i in range(count[0] if values != NULL else 0):
            values[i].sType = getattr(C, f"VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_{suffix}")
        return int(query(physical, count, values))

    found = enumerate_all(typed, struct, physical, what=name)
    result = "ResultType" if suffix == "KHR" else "DType"
    return [
        (p.MSize, p.NSize, p.KSize)
        for p in found
        if p.AType == p.BType == _F16
        and p.CType == getattr(p, result) == _F32
        and p.scope == _SUBGROUP
        and not getattr(p, "saturatingAccumulation", 0)
    ]


def best(api: str, found: list[tuple[int, int, int]], lanes: int) -> MatrixUnits | None:
    """The size to use: 16 x 16 x 16, which most GPUs are built for, else the largest that serves."""
    able = [units for size in found if usable(units := MatrixUnits(api, *size, lanes))]
    return max(able, key=lambda u: (u[1:4] == (16, 16, 16), u.m * u.n * u.k), default=None)


def units_of(
    instance: Any, physical: Any, features: dict[str, bool | int | str], lanes: int
) -> tuple[MatrixUnits, ...]:
    """For every extension that the device has, the best size that it reports."""
    if not all(features[name] for name in BESIDES):
        return ()
    apis = (api for api, feature in FEATURES.items() if features[feature])
    found = (best(api, _sizes(instance, physical, api.upper()), lanes) for api in apis)
    return tuple(units for units in found if units)
