"""Runs a chat template in a child process (template_worker.py), because a template of 119 characters can
crash the Python interpreter. If the process ends, another is started.

Both processes store the last conversation, and a frame contains only changes. Sending 1 MB as JSON takes 20
ms; comparing 1 MB with the last conversation takes 0.2 ms.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from vkbackend.errors import InvalidArgument
from vkbackend.models.processes.child import Child, Ended
from vkbackend.models.processes.frames import ANSWERED, ASKED, ENDED, HEAD
from vkbackend.models.processes.memory_limits import TEMPLATE_MEMORY
from vkbackend.models.processes.shared import Shared

MAX_REQUEST = 1 << 25  # Bytes; twice the longest text that a tokenizer accepts.
CPU_S, WALL_S = 5, 30.0  # Per request. The longest published templates compile in 0.1 s.
ANOTHER = "give another one with --chat-template-file (in Python `template`)"

Items = tuple[tuple[str, Any], ...]


class TemplateProcess:
    """A compiled template. Threads may share it, but render one at a time. The errors are ChatTemplate's."""

    def __init__(self, source: str, bos: str, eos: str, most: int) -> None:
        template = {"source": source, "bos": bos, "eos": eos, "most": most}
        self.shared = Shared(lambda: _started(template), "the chat template")
        self.shared.use(lambda worker: None, WALL_S)

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] = MappingProxyType({})
    ) -> str:
        items = [tuple(message.items()) for message in messages]
        return self.shared.use(lambda worker: worker.render(items, dict(variables)), WALL_S)


class _Worker(Child):
    def __init__(self) -> None:
        self._last: tuple[list[Items], str] = [], ""
        super().__init__("vkbackend.models.text.template_worker", "the chat template", TEMPLATE_MEMORY)

    def render(self, messages: list[Items], variables: dict[str, Any]) -> str:
        before, text = self._last
        self._last = [], ""
        n = sum(1 for _ in takewhile(_same, zip(messages, before, strict=False)))
        kept, rest = self.ask({"messages": messages[n:], "variables": variables, "held": len(text)}, n)
        self._last = messages, text[:kept] + rest
        return self._last[1]

    def ask(self, request: dict[str, Any], kept: int) -> tuple[int, str]:
        """Send a request, whose messages follow the first `kept` messages of the last request. Return how
        many characters of the last rendered text are unchanged, and the text after these characters."""
        try:
            text = json.dumps(request | {"cpu_s": CPU_S}, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"a conversation of texts is expected: {error}") from None
        body = text.encode("utf-8", "surrogatepass")
        if len(body) > MAX_REQUEST:
            raise InvalidArgument(f"the conversation has {len(body)} bytes, at most {MAX_REQUEST} are taken")
        try:
            frame = HEAD.pack(len(body), kept, ASKED), body
            kind, kept, reply = self.exchange(frame, WALL_S, ANSWERED, MAX_REQUEST, CPU_S)
            text = self._text(reply)
        except TimeoutError:
            raise InvalidArgument(f"the chat template took more than {WALL_S:.0f} s; {ANOTHER}") from None
        except Ended as ended:
            if ended.over_cpu:
                raise InvalidArgument(f"the chat template computed for {CPU_S} s; {ANOTHER}") from None
            if ended.excess:
                raise InvalidArgument(
                    f"the chat template takes more than {TEMPLATE_MEMORY >> 20} MB of memory"
                ) from None
            raise InvalidArgument(
                f"the chat template ended the process that ran it ({ended}); {ANOTHER}"
            ) from None
        if kind == ENDED:
            self.kill()
        if kind != ANSWERED:
            raise InvalidArgument(text)
        return kept, text

    def _text(self, reply: bytearray) -> str:
        try:
            return reply.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise self.ended() from None


def _started(template: dict[str, Any]) -> _Worker:
    worker = _Worker()
    worker.ask(template, 0)
    return worker


def _same(pair: tuple[Items, Items]) -> bool:
    """Return whether two messages are equal and contain only texts. Other values, such as lists, could change
    in place, and the comparison would not see it."""
    return pair[0] == pair[1] and all(isinstance(value, str) for _, value in pair[0])
