"""The devices of this machine, and their table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vkbackend.errors import UnsupportedFeature
from vkbackend.tools.console import size, table

if TYPE_CHECKING:
    from rich.console import Console

    from vkbackend.device_info import DeviceInfo

WIDE = 140  # In a terminal of at least this width, the table has a column for UUIDs.


def present() -> list[DeviceInfo]:
    """Raise UnsupportedFeature if a device or a Vulkan loader is missing."""
    from vkbackend.vulkan.instance import devices, no_device_message

    if not (infos := devices()):
        raise UnsupportedFeature(no_device_message())
    warn_of_missing_driver_file()
    return infos


def warn_of_missing_driver_file() -> None:
    from vkbackend.vulkan.instance import missing_driver_file

    if missing := missing_driver_file():
        print(f"note: {missing}", file=sys.stderr)


def show_devices(infos: Sequence[DeviceInfo], out: Console, title: str = "") -> None:
    """Print a row per device. On a narrow terminal, UUIDs have their own table."""
    columns = ["index", "name", "vendor", "type", "driver", "Vulkan", "memory", "PCI"]
    rows = [
        [
            info.index,
            info.name,
            info.vendor,
            info.type,
            f"{info.driver} {info.driver_version}",
            info.api,
            size(sum(heap.nbytes for heap in info.heaps if heap.device_local)),
            info.pci or "-",
        ]
        for info in infos
    ]
    whole = [[*row, info.uuid] for row, info in zip(rows, infos, strict=True)]
    if out.width >= WIDE:
        out.print(table(title, [*columns, "UUID"], whole))
    else:
        out.print(table(title, columns, rows))
        out.print(table("", ["index", "UUID"], [[info.index, info.uuid] for info in infos]))
