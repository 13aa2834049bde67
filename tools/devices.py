"""`vkbackend devices`: list the Vulkan devices of this machine.

--device takes the index, which is stable while drivers and cards stay the same, the UUID or the name; a
device may be opened several times. GPUs come before software devices.
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
