"""Device limits that recording depends on.

`Limits.floor()` is the portable floor, which is guaranteed by Vulkan 1.1 without optional features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

# Features of ops that round activations to less than F32, or sum in fewer bits.
INEXACT = frozenset({"int_dot", "matrix_units", "int8_units", "cooperative_matrix", "cooperative_matrix_nv"})


class MatrixUnits(NamedTuple):
    """The matrix sizes that a subgroup of `lanes` invocations multiplies at once: F16 [m, k] by [k, n] with
    F32 sums, and int8 [m, int8_k] by [int8_k, n] with 32-bit sums (`int8_k` is 0 without int8 units)."""

    api: str = "khr"  # extension: khr or nv
    m: int = 16
    n: int = 16
    k: int = 16
    lanes: int = 32
    int8_k: int = 0


_COMMON = MatrixUnits()


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one device. The defaults are guaranteed by Vulkan 1.1."""

    max_invocations: int = 128  # per workgroup
    max_shared_nbytes: int = 16_384
    max_groups: tuple[int, int, int] = (65_535, 65_535, 65_535)
    storage_align: int = 256  # minStorageBufferOffsetAlignment, bytes
    uniform_align: int = 256  # minUniformBufferOffsetAlignment, bytes
    max_storage_range: int = 1 << 27  # bytes of one storage binding
    max_allocation_nbytes: int = 1 << 30  # the guarantee of Vulkan 1.1's maintenance3
    host_import_align: int = 4096  # alignment of address and size, bytes; at least a page
    subgroup_size: int = 1
    is_cpu: bool = False
    choices: tuple[tuple[str, tuple[str, ...]], ...] = ()  # class of rows -> ops (ops/measured.py)
    matrix_units: MatrixUnits = _COMMON  # valid if `features` has "matrix_units"
    features: frozenset[str] = frozenset()  # available to shaders, named as in capabilities.py

    def exact(self) -> Limits:
        return replace(self, features=self.features - INEXACT)

    @classmethod
    def floor(cls) -> Limits:
        return cls()


# Vulkan's guarantees, named as in DeviceInfo.limits.
_GUARANTEED = {
    "max_invocations": 128,
    "max_shared_nbytes": 16_384,
    "max_groups_x": 65_535,
    "max_groups_y": 65_535,
    "max_groups_z": 65_535,
    "max_storage_range": 1 << 27,
    "max_uniform_range": 16_384,
    "max_push_nbytes": 128,
    "max_storage_buffers": 4,
    "max_allocation_nbytes": 1 << 30,
    "max_allocations": 4096,
    "subgroup_size": 1,
}


def plausible(reported: dict[str, int]) -> dict[str, int]:
    """Replace each 0 (not reported by the driver) by Vulkan's guarantee."""
    return {name: value or _GUARANTEED.get(name, 0) for name, value in reported.items()}
