"""The flags of chat templates."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vkbackend.errors import InvalidArgument


def add_template_arguments(parser: argparse.ArgumentParser, then: str = "") -> None:
    """`then` extends the help of --chat-template-kwargs."""
    add = parser.add_argument
    add("--chat-template-file", metavar="FILE",
        help="a jinja template (default: the model's, or ChatML)")  # fmt: skip
    add("--chat-template-kwargs", metavar="JSON", type=variables, default={},
        help="variables for the template, for example "
        """'{"enable_thinking": false}'""" + then)  # fmt: skip


def variables(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
        if isinstance(values, dict):
            return values
        why = f"a {type(values).__name__}"
    except ValueError as error:
        why = str(error)
    raise argparse.ArgumentTypeError(f"{text!r}: expected a JSON object; it is {why}")


def read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"the chat template {path!r} cannot be read: {error}; give a UTF-8 text"
        ) from None
