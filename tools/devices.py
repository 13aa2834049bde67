"""`vkbackend devices`: what Vulkan devices are there.

The index is what --device takes; it is stable as long as drivers and cards stay. Real GPUs come first, then
software devices; a device may be named by its UUID or name as well, and may be opened several times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vkbackend.errors import UnsupportedFeature
from vkbackend.tools.console import console, size, table, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from vkbackend.vulkan.capabilities import DeviceInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a JSON list with everything known of each device: features, limits, heaps (in bytes)",
    )


def present() -> list[DeviceInfo]:
    """The devices; raises UnsupportedFeature if there is none, or no Vulkan loader."""
    from vkbackend.vulkan.instance import devices, no_device_message

    if not (found := devices()):
        raise UnsupportedFeature(no_device_message())
    return found


def device_table(infos: Sequence[DeviceInfo], title: str = "") -> Table:
    """One row per device."""
    rows = [
        (
            info.index,
            info.name,
            info.vendor,
            info.type,
            f"{info.driver} {info.driver_version}",
            info.api,
            size(sum(heap.nbytes for heap in info.heaps if heap.device_local)),
            info.pci or "-",
            info.uuid,
        )
        for info in infos
    ]
    return table(
        title, ("index", "name", "vendor", "type", "driver", "Vulkan", "memory", "PCI", "UUID"), rows
    )


def run(args: argparse.Namespace) -> None:
    infos = present()
    if args.json:
        write_json([info.to_json() for info in infos], indent=1)
    else:
        console().print(device_table(infos))


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["devices", *sys.argv[1:]]))
