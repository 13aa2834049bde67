"""`vkbackend devices`: what Vulkan devices are there.

The index is what --device takes; it is stable as long as drivers and cards stay. Real GPUs come first, then
software devices; a device may be named by its UUID or name as well, and may be opened several times.
"""

from __future__ import annotations

import argparse
import sys

from vkbackend.tools.console import console, write_json
from vkbackend.tools.flags.present import present, show_devices


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a JSON list with everything known of each device: features, limits, heaps (in bytes)",
    )


def run(args: argparse.Namespace) -> None:
    infos = present()
    if args.json:
        write_json([info.to_json() for info in infos], indent=1)
    else:
        show_devices(infos, console())


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["devices", *sys.argv[1:]]))
