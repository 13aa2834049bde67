"""Runs the `vkbackend` command."""

import sys

from vkbackend.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
