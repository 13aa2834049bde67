"""Separates tool calls from the text around them, in text that comes in pieces."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from vkbackend.models.tool_calls.source import Found, JsonEnd, Reading, Source, ToolDelta, Trying

if TYPE_CHECKING:
    from vkbackend.models.tool_calls.formats import ToolFormat

_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)
MAX_HEAD = 512  # characters of a call up to its arguments
ID_CHARACTERS, ID_LENGTH = string.ascii_letters + string.digits, 9  # what Mistral's templates take


def new_id() -> str:
    return "".join(secrets.choice(ID_CHARACTERS) for _ in range(ID_LENGTH))


class ToolReader:
    """`tools`: schemas of the arguments, by the names of the functions. White space around calls is dropped;
    text that only begins like a call is content."""

    def __init__(self, format_: ToolFormat, tools: Mapping[str, Any]) -> None:
        self.source, self.tools, self.n_calls, self.n_done = Source(), tools, 0, 0
        self._format, self._begun = format_, False
        self._reading = self._read()
        self._is_over = False

    def push(self, piece: str, *, last: bool = False) -> list[Found]:
        """Add a piece of text; returns what is certain now."""
        self.source.text += piece
        self.source.ended |= last
        found: list[Found] = []
        while not self._is_over:
            try:
                one = next(self._reading)
            except StopIteration:
                self._is_over = True
                break
            if one is None:
                break
            if isinstance(one, str):
                self._begun = True
            found.append(one)
        return found

    def _read(self) -> Reading:
        source, openers = self.source, self._format.openers
        space = ""  # white space after the content so far: given out once more content follows
        while source.text or not source.ended:
            hits = [(at, -len(mark)) for mark in openers if (at := source.text.find(mark)) >= 0]
            if not self._begun and self._format.at_start and source.text.lstrip()[:1] == "{":
                hits.append((source.text.index("{"), 0))
            n = min(hits)[0] if hits else source.n_certain(openers)
            content = space + source.cut(n)
            kept = content.rstrip()
            space = content[len(kept) :]
            if kept and (self._begun or kept.strip()):
                yield kept
            if hits:
                source.taken = ""
                assert self._format.read is not None, "it has openers"
                if (yield from self._format.read(self)):
                    space = ""
                else:  # no call: the opener, at least, is content
                    yield space + (source.taken or source.cut(1))
                    space = ""
            elif source.ended:
                break
            else:
                yield None
        if space and not self.n_calls and self._begun:
            yield space

    # ---- parts that formats share ----

    def begin(self, name: str, id_: str | None = None) -> ToolDelta:
        """The next call."""
        self.n_calls += 1
        return ToolDelta(self.n_calls - 1, id_ or new_id(), name)

    def arguments(self) -> Reading:
        """Stream the JSON object that comes next as the arguments of the last call; {} if none comes."""
        yield from self.source.skip_space()
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
            if n is not None or self.source.ended:
                self.n_done = self.n_calls
                return
            yield None

    def whole(self, name: str, arguments: Any, id_: str | None = None) -> Reading:
        """A call whose name and arguments are known at once."""
        yield self.begin(name, id_)
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield ToolDelta(self.n_calls - 1, arguments=text)
        self.n_done = self.n_calls

    def call_object(self, names: Collection[str] | None = None) -> Trying:
        """Read {"name": ..., "arguments" or "parameters": {...}}, in any order. Returns whether it is such an
        object, with one of the `names` (None: any)."""
        source, end, seen = self.source, JsonEnd(), 0
        while True:
            # After MAX_HEAD characters without a head, the name follows the arguments, or is missing.
            head = _HEAD.match(source.text) if len(source.text) <= MAX_HEAD or not seen else None
            if head and (name := _decoded(head[1])) is not None:
                if names is not None and name not in names:
                    return False
                source.cut(head.end())
                yield self.begin(name)
                yield from self.arguments()
                yield from self._rest_of_object()
                return True
            n = end.push(source.text[seen:])
            if n is not None:
                found = _decoded(source.text[: seen + n])
                return (yield from self._of_object(found, names, seen + n))
            seen = len(source.text)
            if source.ended:
                return False
            yield None

    def _of_object(self, found: Any, names: Collection[str] | None, n: int) -> Trying:
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return False
        if names is not None and found["name"] not in names:
            return False
        arguments = found.get("arguments", found.get("parameters", {}))
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict | str):
            return False
        self.source.cut(n)
        id_ = found.get("id")
        yield from self.whole(found["name"], arguments, id_ if isinstance(id_, str) else None)
        return True

    def _rest_of_object(self) -> Reading:
        end = JsonEnd(depth=1)
        while True:
            n = end.push(self.source.text)
            self.source.cut(len(self.source.text) if n is None else n)
            if n is not None or self.source.ended:
                return
            yield None


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
