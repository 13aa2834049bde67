"""`vkbackend split`: write a GGUF model as several files, like llama.cpp's gguf-split.

The parts are PREFIX-00001-of-0000N.gguf. Other commands accept the first part as the model. A part has at
most 128 tensors by default. Tensors are copied unchanged.
"""

from __future__ import annotations

import argparse
import sys

from vkbackend.atomic_file import check_target
from vkbackend.errors import InvalidArgument
from vkbackend.models.gguf.parts import cut, part_paths, split_gguf
from vkbackend.models.gguf.reader import GGUF
from vkbackend.tools.console import byte_progress, console, printable, size

_UNITS = {"M": 10**6, "G": 10**9}  # gguf-split's units


def part_size(text: str) -> int:
    number, unit = text[:-1], text[-1:].upper()
    if not (number.isascii() and number.isdigit() and int(number) and unit in _UNITS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; give a number with M or G, for example 2G")
    return int(number) * _UNITS[unit]


def count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tensors; give 1 or more")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="FILE", help="the model, a .gguf file, or a part of it")
    add("prefix", metavar="PREFIX", help="the prefix of the parts' names")
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--split-max-tensors", type=count, default=128, metavar="N",
        help="the most tensors in a part (default: %(default)s)")  # fmt: skip
    limit.add_argument("--split-max-size", type=part_size, metavar="N(M|G)",
        help="the most bytes of tensors in a part: M for millions, G for billions")  # fmt: skip
    add("--no-tensor-first-split", action="store_true", help="the first part has only the metadata")
    add("--dry-run", action="store_true", help="show the parts and write nothing")


def run(args: argparse.Namespace) -> None:
    by_size = args.split_max_size is not None
    limits = {"max_nbytes": args.split_max_size} if by_size else {"max_tensors": args.split_max_tensors}
    with GGUF.open(args.model) as source:
        parts = cut(source.tensors.values(), **limits, first_without=args.no_tensor_first_split)
        paths = part_paths(args.prefix, len(parts))
        if not args.dry_run:
            check_target(paths[0], InvalidArgument)
            with byte_progress(console(stderr=True), "writing", keep=True) as progress:
                split_gguf(source, args.prefix, parts, progress)
    for path, part in zip(paths, parts, strict=True):
        summary = f"{path}: {len(part)} tensors, {size(sum(info.nbytes for info in part))}"
        sys.stdout.write(printable(summary) + "\n")
