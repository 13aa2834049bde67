"""The flags -p and -f, and a text from a pipe."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from pathlib import Path

from vkbackend.errors import InvalidArgument
from vkbackend.paths import quoted, why
from vkbackend.system.files import text_of


def add_prompt_arguments(parser: argparse.ArgumentParser, about: str) -> None:
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("-p", "--prompt", metavar="TEXT", help=about)
    prompt.add_argument("-f", "--file", metavar="FILE", help="read the text from a UTF-8 file, - for stdin")


def read_prompt(args: argparse.Namespace) -> str:
    """Return the prompt without one final newline."""
    name = "-" if args.file is None and args.prompt is None and text_is_piped() else args.file
    if name is None:
        return args.prompt or ""
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return text_of(data).removesuffix("\n")
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"the prompt file {quoted(name)} cannot be read: {why(error)}; give a UTF-8 text"
        ) from None


def text_is_piped() -> bool:
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
