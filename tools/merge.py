"""`vkbackend merge`: join the parts of a split GGUF model, like llama.cpp's gguf-split."""

from __future__ import annotations

import argparse
import sys

from vkbackend.atomic_file import check_target
from vkbackend.errors import InvalidArgument
from vkbackend.models.gguf.parts import merge_gguf
from vkbackend.models.gguf.reader import GGUF
from vkbackend.tools.console import byte_progress, console, printable, size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="FILE", help="any part of the model; the others must be in the same folder")
    add("output", metavar="OUTPUT", help="the .gguf file to write")


def run(args: argparse.Namespace) -> None:
    check_target(args.output, InvalidArgument)
    with GGUF.open(args.model) as source:
        with byte_progress(console(stderr=True), "writing", keep=True) as progress:
            merge_gguf(source, args.output, progress)
        total = sum(info.nbytes for info in source.tensors.values())
        summary = f"{args.output}: {len(source.tensors)} tensors, {size(total)}, of {len(source.paths)} files"
    sys.stdout.write(printable(summary) + "\n")
