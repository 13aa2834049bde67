from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

# Ops with these features round activations to less than F32, or sum with less precision.
INEXACT = frozenset({"int_dot", "matrix_units", "int8_units", "cooperative_matrix", "cooperative_matrix_nv"})


class MatrixUnits(NamedTuple):
    """A subgroup of `lanes` invocations multiplies F16 [m, k] by [k, n] with F32 sums, and int8 [m, int8_k]
    by [int8_k, n] with int32 sums. Without int8 units, `int8_k` is 0."""

    api: str = "khr"  # extension: khr or nv
    m: int = 16
    n: int = 16
    k: int = 16
    lanes: int = 32
    int8_k: int = 0


_COMMON = MatrixUnits()


@dataclass(frozen=True, slots=True)
class Limits:
    """The defaults are Vulkan 1.1's guaranteed minimum, without optional features."""

    max_invocations: int = 128  # per workgroup
    max_shared_nbytes: int = 16_384
    max_groups: tuple[int, int, int] = (65_535, 65_535, 65_535)
    storage_align: int = 256  # Bytes (minStorageBufferOffsetAlignment).
    uniform_align: int = 256  # Bytes (minUniformBufferOffsetAlignment).
    max_storage_range: int = 1 << 27  # Bytes of one storage binding.
    max_allocation_nbytes: int = 1 << 30  # Guaranteed by VK_KHR_maintenance3.
    host_import_align: int = 4096  # Alignment of an imported range's address and size, at least one page.
    subgroup_size: int = 1
    is_cpu: bool = False
    # The measured order of ops for each class of row counts (ops/measured.py).
    choices: tuple[tuple[str, tuple[str, ...]], ...] = ()
    # If set, a row has the same bits in every decoding step of 1 to MAX_VEC_ROWS rows (ops/matrix.py).
    batch_invariant: bool = False
    matrix_units: MatrixUnits = _COMMON  # Valid only if `features` contains "matrix_units".
    # Features that shaders may use, as named in capabilities.py.
    features: frozenset[str] = frozenset()

    def exact(self) -> Limits:
        return replace(self, features=self.features - INEXACT, batch_invariant=True)

    @property
    def few_registers(self) -> bool:
        """Return whether to assume 64 registers per lane, as on Mali. The sign is subgroups of 16 on a GPU
        without matrix units: Intel's GPUs with subgroups of 16 have matrix units."""
        return self.subgroup_size == 16 and not self.is_cpu and "matrix_units" not in self.features

    @classmethod
    def floor(cls) -> Limits:
        return cls()


# Keys are the names in DeviceInfo.limits.
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
    """Replace each limit that a driver reports as 0 by the guaranteed minimum."""
    return {name: value or _GUARANTEED.get(name, 0) for name, value in reported.items()}
