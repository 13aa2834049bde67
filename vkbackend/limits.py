"""What a device can do, as far as recording an op depends on it; every number is a Vulkan limit.

`Limits.floor()` is the portable floor: what Vulkan 1.1 guarantees without optional features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

# Features whose ops round activations to fewer bits than F32 has, or add up in fewer.
INEXACT = frozenset({"int_dot", "matrix_units", "int8_units", "cooperative_matrix", "cooperative_matrix_nv"})


class MatrixUnits(NamedTuple):
    """The matrices that a subgroup of `lanes` multiplies at once: [m, k] by [k, n] halves, sums in f32, and
    [m, int8_k] by [int8_k, n] integers of 8 bits, sums in 32 bits (int8_k 0: none)."""

    api: str = "khr"  # the extension: khr, or nv
    m: int = 16
    n: int = 16
    k: int = 16
    lanes: int = 32
    int8_k: int = 0


_COMMON = MatrixUnits()


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one device; the defaults are those every Vulkan 1.1 implementation guarantees."""

    max_invocations: int = 128  # per workgroup
    max_shared_nbytes: int = 16_384
    max_groups: tuple[int, int, int] = (65_535, 65_535, 65_535)
    storage_align: int = 256  # minStorageBufferOffsetAlignment, bytes
    uniform_align: int = 256  # minUniformBufferOffsetAlignment, bytes
    max_storage_range: int = 1 << 27  # bytes of one storage binding
    max_allocation_nbytes: int = 1 << 30  # one allocation; the guarantee of Vulkan 1.1's maintenance3
    host_import_align: int = 4096  # address and size of host pages, bytes; at least a page
    subgroup_size: int = 1
    is_cpu: bool = False
    choices: tuple[tuple[str, tuple[str, ...]], ...] = ()  # measured: class of rows -> ops (ops/measured.py)
    matrix_units: MatrixUnits = _COMMON  # of the device, if `features` has "matrix_units"; else means nothing
    features: frozenset[str] = frozenset()  # optional ones that shaders may use, named as in capabilities.py

    def exact(self) -> Limits:
        """The same for ops of F32 activations alone."""
        return replace(self, features=self.features - INEXACT)

    @classmethod
    def floor(cls) -> Limits:
        """The portable floor; ops recorded for it run on every device."""
        return cls()


# What Vulkan guarantees of a limit, by the names of DeviceInfo.limits.
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
    """The limits that a driver reports. A 0 means that the driver left the limit out; what Vulkan guarantees
    takes its place."""
    return {name: value or _GUARANTEED.get(name, 0) for name, value in reported.items()}
