"""Compile all shaders of the manifest into shaders/spv/: `python -m vkbackend.tools.build_shaders`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from vkbackend import shaderlib
from vkbackend.errors import VkbackendError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="build_shaders", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=shaderlib.shaders_dir() / "spv", metavar="DIR")
    args = parser.parse_args(argv)
    try:
        count = shaderlib.build(args.output)
    except (VkbackendError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{count} SPIR-V modules in {args.output}")
    if left := len(shaderlib.variants()) - count:
        print(f"{left} left out: no compiler is new enough (tools/setup.sh unpacks one)", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
