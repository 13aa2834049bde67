"""A model's chat template: messages to the text that the model was trained to answer.

Templates come with the file, so they run in jinja2's immutable sandbox with limits on their size and on the
text they make; the time and memory they take on the way have none. They find what Hugging Face's
`apply_chat_template` gives them: `trim_blocks`, `lstrip_blocks`, loop controls, `{% generation %}`, `tojson`,
`raise_exception`, `strftime_now`, and no tools or documents.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vkbackend.errors import InvalidArgument, UnsupportedModel
from vkbackend.models.text.tokenizer import MAX_TEXT

MAX_SOURCE = 1 << 20  # characters; the longest of known models have some 20,000

Message = Mapping[str, str]  # "role" ("system", "user", "assistant") and "content"


def required(source: str | None) -> str:
    """`source`; raises UnsupportedModel where a model has none."""
    if source is None:
        raise UnsupportedModel(
            "the model has no chat template; give one with --chat-template-file (in Python `template`), or "
            "continue plain text with `vkbackend generate`"
        )
    return source


class ChatTemplate:
    """A compiled template. `bos` and `eos` are the texts of these tokens, which it may write out.

    Raises InvalidArgument: too long, or no valid template.
    """

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        if len(source) > MAX_SOURCE:
            raise InvalidArgument(f"the chat template has {len(source)} characters, expected <= {MAX_SOURCE}")
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        env.filters["tojson"] = _to_json
        env.globals |= {
            "raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form),
            "bos_token": bos, "eos_token": eos,
        }  # fmt: skip
        try:
            self._template = env.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise InvalidArgument(f"the chat template is not valid: {_first_line(error)}") from None

    def render(self, messages: Sequence[Message]) -> str:
        """The text that asks for the answer to `messages`. Raises InvalidArgument where the template refuses
        them, fails, or makes more text than a tokenizer takes."""
        pieces: list[str] = []
        room = MAX_TEXT
        try:
            for piece in self._template.generate(
                messages=messages, add_generation_prompt=True, tools=None, documents=None
            ):
                pieces.append(piece)
                room -= len(piece)
                if room < 0:
                    raise InvalidArgument(f"the chat template makes more than {MAX_TEXT} characters")
        except InvalidArgument:
            raise
        except Exception as error:  # whatever a template can do wrong: any operator on any value
            raise InvalidArgument(
                f"the chat template does not take this conversation: {_first_line(error)}"
            ) from None
        return "".join(pieces)


class _Generation(Extension):
    """`{% generation %}` marks what the model said, for training: its body alone counts here."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    """Without jinja2's escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]
