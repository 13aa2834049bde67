"""`vkbackend info`: show metadata and tensors of a GGUF file.

The command reads only the header, so it needs no device and accepts models that vkbackend cannot run.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from vkbackend.models.gguf.reader import GGUF
from vkbackend.tools.console import console, printable, size, table, write_json

SHOWN_CHARACTERS = 72
SHOWN_ELEMENTS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    text = "a .gguf file; of a split model, any of its parts"
    model.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=text)
    model.add_argument("-m", "--model", dest="model", metavar="MODEL", help="the same")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object: files, metadata (arrays in full), tensors (shapes rows first, bytes)",
    )


def short(value: Any) -> str:
    if isinstance(value, str | bool | int | float):
        text = value if isinstance(value, str) else repr(value)
    else:
        items = value[:SHOWN_ELEMENTS]
        head = ", ".join(map(repr, items.tolist() if hasattr(items, "tolist") else items))
        text = f"[{head}{', ...' if len(value) > SHOWN_ELEMENTS else ''}]"
    text = printable(text)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def run(args: argparse.Namespace) -> None:
    with GGUF.open(args.model) as gguf:
        tensors = list(gguf.tensors.values())
        if args.json:
            write_json(
                {
                    "files": [str(path) for path in gguf.paths],
                    "metadata": dict(gguf.metadata),
                    "tensors": [
                        {"name": t.name, "type": t.type, "shape": t.shape, "nbytes": t.nbytes, "file": t.file,
                         "offset": t.offset}
                        for t in tensors
                    ],
                }
            )  # fmt: skip
            return
        metadata = [
            (key, gguf.metadata.describe(key).partition(" ")[2], short(value))  # without the article
            for key, value in gguf.metadata.items()
        ]
        rows = [(t.name, t.type, " x ".join(map(str, t.shape)), size(t.nbytes)) for t in tensors]
        n_parameters = sum(math.prod(t.shape) for t in tensors)
        out = console()
        out.print(table("metadata", ("key", "type", "value"), metadata), "")
        out.print(table("tensors", ("name", "type", "shape (rows first)", "size"), rows), "")
        total = size(sum(t.nbytes for t in tensors))
        out.print(f"{len(tensors)} tensors, {n_parameters:,} parameters, {total}", markup=False)


if __name__ == "__main__":
    from vkbackend.tools.cli import main

    sys.exit(main(["info", *sys.argv[1:]]))
