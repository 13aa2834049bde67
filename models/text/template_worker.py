"""Compiles and renders a chat template under limits, for template_process.py.

The first request is a template; all later requests are conversations. The number in a request is how many
messages are unchanged since the last request. The number in a reply is how many characters are unchanged.
"""

from __future__ import annotations

import json
import os
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vkbackend.models.processes import worker
from vkbackend.models.processes.frames import ANSWERED, ASKED, ENDED, HEAD, MAX_ERROR, READY, REFUSED
from vkbackend.models.processes.memory_limits import TEMPLATE_MEMORY
from vkbackend.models.processes.worker import first_line, limit_cpu, receive, send_text
from vkbackend.models.text.prefix import n_common

NOTHING = {"tools": None, "documents": None}


class Refused(worker.Refused):
    """`by_template` is True if the template called `raise_exception`."""

    def __init__(self, why: str, by_template: bool = False) -> None:
        super().__init__(why)
        self.by_template = by_template


# ---- the template ----


class Generation(Extension):
    """Renders the body of `{% generation %}`, which marks the model's words for training."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON like Hugging Face's `tojson`, with the same order of arguments and without HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> None:
    raise TemplateError(message)


def compiled(source: str, bos: str, eos: str) -> Template:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    env.filters["tojson"] = to_json
    env.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "bos_token": bos,
        "eos_token": eos,
    }
    try:
        return env.from_string(source)
    except MemoryError:
        raise
    except Exception as error:  # Python's compiler raises errors that jinja2 does not catch.
        raise Refused(f"the chat template is not valid: {first_line(error)}") from None


def today() -> dict[str, Any]:
    """Return the dates that templates read, in llama.cpp's formats. Without these dates, Llama 3.1's template
    writes a date in 2024."""
    now = datetime.now()
    return {"date_string": now.strftime("%d %b %Y"), "datetime": now.strftime("%b %d %Y")}


def rendered(template: Template, messages: list[Any], variables: dict[str, Any], most: int) -> str:
    """Render with None for missing tools or documents, as Hugging Face does. Templates that loop over None
    fail (Hermes 2 and 3, Command R+), so render again without these names, as llama.cpp does."""
    variables = today() | variables
    try:
        return joined(template, {"messages": messages, **NOTHING, **variables}, most)
    except Refused as refusal:
        if refusal.by_template or NOTHING.keys() <= variables.keys():
            raise
        try:
            return joined(template, {"messages": messages, **variables}, most)
        except Refused:
            raise refusal from None


def joined(template: Template, variables: dict[str, Any], most: int) -> str:
    pieces: list[str] = []
    room = most
    try:
        for piece in template.generate(variables):
            pieces.append(piece)
            room -= len(piece)
            if room < 0:
                break
    except MemoryError:
        raise
    except Exception as error:  # Templates can apply any operator to any value.
        by_template = type(error) is TemplateError
        raise Refused(
            f"the chat template does not take this conversation: {first_line(error)}", by_template
        ) from None
    if room < 0:
        raise Refused(f"the chat template makes more than {most} characters", True)
    return "".join(pieces)


# ---- the process ----


def main() -> None:
    worker.run(serve, TEMPLATE_MEMORY)


def serve() -> None:
    template: Template | None = None
    messages: list[Any] = []
    last, most = "", 0
    send_text(READY, "")
    while True:
        n_bytes, kept, kind = HEAD.unpack(receive(HEAD.size))
        assert kind == ASKED
        request = json.loads(receive(n_bytes))
        limit_cpu(request["cpu_s"])
        try:
            if template is None:
                template, most = compiled(request["source"], request["bos"], request["eos"]), request["most"]
                send_text(ANSWERED, "")
            else:
                messages[kept:] = map(dict, request["messages"])
                text = rendered(template, messages, request["variables"], most)
                kept = n_common(text, last[: request["held"]])
                send_text(ANSWERED, text[kept:], kept)
                last = text
        except Refused as error:
            send_text(REFUSED, str(error)[:MAX_ERROR])
        except MemoryError:
            send_text(ENDED, f"the chat template takes more than {TEMPLATE_MEMORY >> 20} MB of memory")
            os._exit(1)  # The state of the process is unknown.


if __name__ == "__main__":
    main()
