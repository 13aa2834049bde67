"""`vkbackend devices`: what Vulkan devices are there.

The index is what --device takes; it is stable as long as drivers and cards stay. Real GPUs come first, then
software devices; a device may be named by its UUID or name as well, and may be opened several times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vkbackend.device_info import DeviceInfo
from vkbackend.errors import UnsupportedFeature
from vkbackend.tools.console import console, size, table, write_json

if TYPE_CHECKING:
    from rich.console import Console


WIDE = 140  # columns that hold a UUID beside everything else of a device


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


def show_devices(infos: Sequence[DeviceInfo], out: Console, title: str = "") -> None:
    """One row per device; where a terminal is too narrow, their UUIDs in a table of their own."""
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


def run(args: argparse.Namespace) -> None:
    infos = present()
    if args.json:
        write_json([info.to_json() for info in infos], indent=1)
    else:
        show_devices(infos, console())


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["devices", *sys.argv[1:]]))
