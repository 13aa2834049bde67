"""Queries the matrix sizes of a device's matrix units, for F16 with F32 sums and for int8 with int32 sums.
Uses VK_KHR_cooperative_matrix or VK_NV_cooperative_matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vkbackend.limits import MatrixUnits
from vkbackend.ops.units import usable, usable_int8_k
from vkbackend.vulkan.vk import NULL, C, enumerate_all, ffi, lib

# VkComponentTypeKHR and VkScopeKHR have the same values in both extensions.
_F16, _F32, _INT8, _INT32, _SUBGROUP = 0, 1, 3, 5, 3
HALVES, INTEGERS = (_F16, _F32), (_INT8, _INT32)  # The types of operands and sums.
# Features that matrix units need. If memory_model is enabled, atomics in every shader need
# memory_model_device.
BESIDES = ("float16", "memory_model", "memory_model_device")
# Each extension's feature, in order of preference.
FEATURES = {"khr": "cooperative_matrix", "nv": "cooperative_matrix_nv"}
Sizes = list[tuple[int, int, int]]  # (m, n, k)


def _sizes(instance: Any, physical: Any, suffix: str) -> dict[tuple[int, int], Sizes]:
    """Return the matrix sizes (m, n, k) that a subgroup can multiply, for HALVES and INTEGERS."""
    name = f"vkGetPhysicalDeviceCooperativeMatrixProperties{suffix}"
    struct = f"VkCooperativeMatrixProperties{suffix}"
    address = lib.vkGetInstanceProcAddr(instance, name.encode())
    if address == NULL:
        return {HALVES: [], INTEGERS: []}
    query = ffi.cast(f"PFN_{name}", address)

    def typed(physical: Any, count: Any, values: Any) -> int:
        for i in range(count[0] if values != NULL else 0):
            values[i].sType = getattr(C, f"VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_{suffix}")
        return int(query(physical, count, values))

    properties = enumerate_all(typed, struct, physical, name=name)
    result = "ResultType" if suffix == "KHR" else "DType"
    return {
        (operands, sums): [
            (p.MSize, p.NSize, p.KSize)
            for p in properties
            if p.AType == p.BType == operands
            and p.CType == getattr(p, result) == sums
            and p.scope == _SUBGROUP
            and not getattr(p, "saturatingAccumulation", 0)
        ]
        for operands, sums in (HALVES, INTEGERS)
    }


def best(
    api: str, sizes: Sizes, lanes: int, integers: Sequence[tuple[int, int, int]] = ()
) -> MatrixUnits | None:
    """Return 16 x 16 x 16 if possible, because it is native on most GPUs, and otherwise the largest usable
    size. `int8_k` is the largest int8 k for this m and n."""
    able = [units for size in sizes if usable(units := MatrixUnits(api, *size, lanes))]
    if not able:
        return None
    largest = max(able, key=lambda u: (u[1:4] == (16, 16, 16), u.m * u.n * u.k))
    if api != "khr":  # No int8 shaders for nv.
        return largest
    depths = [k for m, n, k in integers if (m, n) == (largest.m, largest.n) and usable_int8_k(k)]
    return largest._replace(int8_k=max(depths, default=0))


def units_of(
    instance: Any, physical: Any, features: dict[str, bool | int | str], lanes: int
) -> tuple[MatrixUnits, ...]:
    if not all(features[name] for name in BESIDES):
        return ()
    apis = (api for api, feature in FEATURES.items() if features[feature])
    sizes = ((api, _sizes(instance, physical, api.upper())) for api in apis)
    largest = (best(api, by_kind[HALVES], lanes, by_kind[INTEGERS]) for api, by_kind in sizes)
    return tuple(units for units in largest if units)
