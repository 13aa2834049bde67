"""Generators that read tool calls from a `Source`, shared by several formats."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Collection, Mapping
from typing import Any

from vkbackend.models.tool_calls.source import JsonEnd, Reading, Source, ToolDelta, Trying

_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)
_FIRST_KEY = re.compile(r'\s*\{\s*"([^"\\]*)"')
_KEYS = ("name", "arguments", "parameters", "id", "type")
MAX_HEAD = 512  # Maximum number of characters before a call's arguments.
ID_CHARACTERS, ID_LENGTH = (
    string.ascii_letters + string.digits,
    9,
)  # for Mistral's templates


def new_id() -> str:
    return "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))


class CallReader:
    """Reads tool calls. `tools` maps each function to its argument schema. `n_fences` counts the code fences
    in the content."""

    def __init__(self, tools: Mapping[str, Any]) -> None:
        self.source, self.tools, self.n_calls, self.n_done, self.n_fences = Source(), tools, 0, 0, 0

    def begin(self, name: str, id_: str | None = None) -> ToolDelta:
        self.n_calls += 1
        return ToolDelta(self.n_calls - 1, id_ or new_id(), name)

    def arguments(self) -> Reading:
        """Yield the next JSON object as the last call's arguments, or {} if no object follows. If a token
        limit ends the text, yield only the part that was read."""
        yield from self.source.skip_space()
        if self.source.is_cut_off:
            return
        if not self.source.text.startswith("{"):
            yield ToolDelta(self.n_calls - 1, arguments="{}")
            self.n_done = self.n_calls
            return
        end = JsonEnd()
        while True:
            n = end.push(self.source.text)
            piece = self.source.cut(len(self.source.text) if n is None else n)
            if piece:
                yield ToolDelta(self.n_calls - 1, arguments=piece)
            if n is not None or not (yield from self.source.wait()):
                if n is not None or not self.source.was_cut:
                    self.n_done = self.n_calls
                return

    def whole(self, name: str, arguments: Any, id_: str | None = None) -> Reading:
        yield self.begin(name, id_)
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield ToolDelta(self.n_calls - 1, arguments=text)
        self.n_done = self.n_calls

    def call_object(self, names: Collection[str] | None = None) -> Trying:
        """Read an object with "name" and "arguments" (or "parameters") in any order. Return whether the
        object calls one of the `names` (None: any function)."""
        source, end, seen = self.source, JsonEnd(), 0
        yield from source.skip_space()
        if source.text and source.text[0] != "{":
            return False
        while True:
            # A name after the first MAX_HEAD characters follows the arguments or is missing.
            head = _HEAD.match(source.text) if len(source.text) <= MAX_HEAD or not seen else None
            if head and (name := _decoded(head[1])) is not None:
                if names is not None and name not in names:
                    return False
                source.cut(head.end())
                yield self.begin(name)
                yield from self.arguments()
                yield from self._rest_of_object()
                return True
            if names is not None and (key := _FIRST_KEY.match(source.text)) and key[1] not in _KEYS:
                return False
            n = end.push(source.text[seen:])
            if n is not None:
                value = _decoded(source.text[: seen + n])
                return (yield from self._of_object(value, names, seen + n))
            seen = len(source.text)
            if not (yield from source.wait()):
                return False

    def _of_object(self, value: Any, names: Collection[str] | None, n: int) -> Trying:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return False
        if names is not None and value["name"] not in names:
            return False
        arguments = value.get("arguments", value.get("parameters", {}))
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict | str):
            return False
        self.source.cut(n)
        id_ = value.get("id")
        yield from self.whole(value["name"], arguments, id_ if isinstance(id_, str) else None)
        return True

    def _rest_of_object(self) -> Reading:
        end = JsonEnd(depth=1)
        while True:
            n = end.push(self.source.text)
            self.source.cut(len(self.source.text) if n is None else n)
            if n is not None or not (yield from self.source.wait()):
                return


def is_object(arguments: str) -> bool:
    """Return whether a call's arguments are a complete JSON object."""
    return isinstance(_decoded(arguments), dict)


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
