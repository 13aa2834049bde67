"""Build options from flags. The destination of a flag is the name of its option."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Unpack

from vkbackend.models.keywords import File, Keywords
from vkbackend.models.options import Options

Add = Callable[..., argparse.Action]


def adder(parser: argparse.ArgumentParser, title: str, options: type = Options) -> Add:
    """Return `add(name, "-f", "--flag", ...)`, which adds a flag for the option `name` to the group `title`.
    The dataclass `options` defines the default value."""
    group = parser.add_argument_group(title)
    defaults = {field.name: field.default for field in fields(options)}

    def add(name: str, *flags: str, **how: Any) -> argparse.Action:
        return group.add_argument(*flags, dest=name, **{"default": defaults.get(name), **how})

    return add


def options_of(args: argparse.Namespace, path: File, **changed: Unpack[Keywords]) -> Options:
    given = fields_given(args, Options)
    if "fit" in given:  # Options that the command itself sets also count as given.
        given["fit"] = [name for name in given["fit"] or () if name not in changed]
    return Options.of(path, **{**given, **changed})


def fields_given(args: argparse.Namespace, options: type) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field in fields(options) if hasattr(args, field.name)}
