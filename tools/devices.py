"""`vkbackend devices`: list the Vulkan devices of this machine.

The flag --device accepts a device's index, UUID or name. The index changes only if drivers or cards change.
GPUs come before software devices. A device may be opened several times.
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
