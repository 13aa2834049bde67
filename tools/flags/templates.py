"""Flags of chat templates."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vkbackend.errors import InvalidArgument
from vkbackend.paths import quoted, why
from vkbackend.tools.flags.built_in_templates import TEMPLATES
from vkbackend.tools.flags.notes import note
from vkbackend.tools.flags.table import OFF, ON


def add_template_arguments(parser: argparse.ArgumentParser, then: str = "") -> None:
    """Add the flags. `then` is appended to the help of --chat-template-kwargs."""
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group().add_argument
    source("--chat-template-file", metavar="FILE",
        help="a jinja template (default: the model's, or ChatML)")  # fmt: skip
    source("--chat-template", metavar="NAME", type=template_text,
        help=f"the same by name ({', '.join(TEMPLATES)}), or as text")  # fmt: skip
    add("-rea", "--reasoning", action=_Reasoning, metavar="on|off|auto", dest=argparse.SUPPRESS,
        help="whether the template asks for thoughts: enable_thinking (default: auto)")  # fmt: skip
    add("--reasoning-effort", action=_Reasoning, metavar="LEVEL", dest=argparse.SUPPRESS,
        help="how much the template asks to think: reasoning_effort (default: its own)")  # fmt: skip
    add("--reasoning-budget", action=_Reasoning, type=int, metavar="N", dest=argparse.SUPPRESS,
        help="0: as --reasoning off; -1: no bound (default: -1)")  # fmt: skip
    add("--chat-template-kwargs", metavar="JSON", type=variables, default={}, action=_Merge,
        help="variables for the template, for example "
        """'{"enable_thinking": false}'""" + then)  # fmt: skip


class _Merge(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: Any = None) -> None:
        namespace.chat_template_kwargs = {**namespace.chat_template_kwargs, **values}


class _Reasoning(argparse.Action):
    """Set variables of the template, which override earlier --chat-template-kwargs."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, flag: Any = None) -> None:
        if "--reasoning-effort" in self.option_strings:
            given = {} if values == "default" else {"reasoning_effort": values}
        elif "--reasoning-budget" in self.option_strings:
            if values not in (-1, 0):
                raise argparse.ArgumentError(
                    self,
                    f"{values}: thoughts have no bound yet; give 0 (none) or -1, or limit the answer (-n)",
                )
            given = {"enable_thinking": False} if values == 0 else {}
        else:
            if values not in (*ON, *OFF, "auto"):
                raise argparse.ArgumentError(self, f"{values!r}: expected one of on, off, auto")
            given = {} if values == "auto" else {"enable_thinking": values in ON}
        for name, value in given.items():
            note(namespace, f"{flag} {values} is --chat-template-kwargs '{json.dumps({name: value})}'")
        namespace.chat_template_kwargs = {**namespace.chat_template_kwargs, **given}


def template_text(text: str) -> str:
    """Return the built-in template of this name, or text with a brace unchanged."""
    if text in TEMPLATES:
        return TEMPLATES[text]
    if "{" in text:
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a built-in template; there are: {', '.join(TEMPLATES)}; give others with "
        "--chat-template-file FILE"
    )


def template_of(args: argparse.Namespace) -> str | None:
    """Raises InvalidArgument."""
    if args.chat_template is not None:
        return str(args.chat_template)
    return None if args.chat_template_file is None else read_template(args.chat_template_file)


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
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"the chat template {quoted(path)} cannot be read: {why(error)}; give a UTF-8 text"
        ) from None
