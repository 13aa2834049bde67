"""Describes a physical device. Importing this module does not need a Vulkan loader."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vkbackend import env
from vkbackend.limits import Limits, MatrixUnits


@dataclass(frozen=True, slots=True)
class Heap:
    """`budget` is how many bytes this process may use, or 0 if the driver reports no budget."""

    nbytes: int
    device_local: bool
    budget: int


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """`index` is the position in `devices()`. `uuid` does not change with a reboot."""

    index: int
    name: str
    uuid: str
    driver_uuid: str
    vendor: str
    driver: str
    driver_version: str
    api: str
    type: str
    pci: str | None
    heaps: tuple[Heap, ...]
    features: dict[str, bool | int | str]
    limits: dict[str, int]
    matrix_units: tuple[MatrixUnits, ...] = ()
    physical: Any = field(repr=False, compare=False, default=None)

    @property
    def is_cpu(self) -> bool:
        return self.type == "cpu"

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__slots__ if name != "physical"}
        return values | {"heaps": [asdict(heap) for heap in self.heaps]}


def left_of(heaps: Sequence[Heap], budgets: Sequence[int], used: Sequence[int]) -> int | None:
    """Return the maximum number of free bytes of a device-local heap, or None if the driver reports no
    budget."""
    left = [
        max(0, min(budgets[i], heap.nbytes) - used[i])
        for i, heap in enumerate(heaps)
        if heap.device_local and budgets[i]
    ]
    return max(left, default=None)


def limits_of(info: DeviceInfo) -> Limits:
    have = info.limits
    return Limits(
        max_invocations=have["max_invocations"],
        max_shared_nbytes=have["max_shared_nbytes"],
        max_groups=(have["max_groups_x"], have["max_groups_y"], have["max_groups_z"]),
        storage_align=have["storage_align"],
        uniform_align=have["uniform_align"],
        max_storage_range=have["max_storage_range"],
        max_allocation_nbytes=min(have["max_allocation_nbytes"], 1 << 30),
        # Drivers report 4096 even if pages have 16 KiB or 64 KiB, but the kernel refuses parts of a page.
        host_import_align=max(have["host_import_align"], mmap.PAGESIZE),
        subgroup_size=have["subgroup_size"],
        is_cpu=info.is_cpu and not env.as_gpu(),
    )
