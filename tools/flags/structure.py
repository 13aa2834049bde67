"""Flags of structured output, with llama.cpp's names."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vkbackend.models.grammar.structure import KEYWORDS, MAX_NBYTES
from vkbackend.paths import quoted, why


class _OfFile(argparse.Action):
    """Store a file's text, so --grammar-file FILE acts like --grammar."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: Any = None) -> None:
        try:
            with Path(values).open("rb") as file:
                text = file.read(MAX_NBYTES + 1).decode()
        except (OSError, ValueError) as error:
            raise argparse.ArgumentError(
                self, f"{quoted(values)} cannot be read: {why(error)}; give a UTF-8 text"
            ) from None
        setattr(namespace, self.dest, text)


def add_structure_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("structured output (extra `grammar`)")
    add = group.add_mutually_exclusive_group().add_argument
    add("-j", "--json-schema", metavar="SCHEMA", default=None,
        help="the answer is JSON of this JSON Schema; {} for any (default: any text)")  # fmt: skip
    add("-jf", "--json-schema-file", dest="json_schema", action=_OfFile, metavar="FILE",
        help="the same from a file")  # fmt: skip
    add("--grammar", metavar="GRAMMAR", default=None, help="the answer follows this grammar, in GBNF")
    add("--grammar-file", dest="grammar", action=_OfFile, metavar="FILE", help="the same from a file")
    add("--regex", metavar="REGEX", default=None, help="the whole answer matches REGEX, in Rust's syntax")


def structure_given(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in KEYWORDS if getattr(args, name, None) is not None}
