"""Separates tool calls from the text around them while the text arrives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vkbackend.models.tool_calls.calls import CallReader
from vkbackend.models.tool_calls.formats import ToolFormat
from vkbackend.models.tool_calls.json_formats import FENCE, NAME_STARTS
from vkbackend.models.tool_calls.source import AnswerPart, Reading


class ToolReader(CallReader):
    """Splits an answer into content and calls. White space around calls is dropped. An invalid call is
    content. The text of calls that a token limit truncates is dropped."""

    def __init__(self, format_: ToolFormat, tools: Mapping[str, Any]) -> None:
        super().__init__(tools)
        self._format, self._begun = format_, False
        self._names = tuple(f"{name}\n" for name in tools) if format_.by_name else ()
        lines = [f"{before}{name}" for name in self._names for before in NAME_STARTS]
        self._openers = (*format_.openers, *lines)
        self._reading = self._read()
        self._is_over = False

    def push(self, piece: str, *, last: bool = False, was_cut: bool = False) -> list[AnswerPart]:
        """Add a piece, and return the content and calls that later text cannot change. `was_cut` is True if a
        token limit ended the text."""
        self.source.text += piece
        self.source.ended |= last
        self.source.was_cut |= was_cut
        parts: list[AnswerPart] = []
        while not self._is_over:
            try:
                part = next(self._reading)
            except StopIteration:
                self._is_over = True
                break
            if part is None:
                break
            if isinstance(part, str):
                self._begun = True
            parts.append(part)
        return parts

    def _read(self) -> Reading:
        source, openers = self.source, self._openers
        space = ""  # White space that counts only if content follows.
        while source.text or not source.ended:
            hits = [(at, -len(mark)) for mark in openers if (at := source.text.find(mark)) >= 0]
            waits = False
            if not self._begun:
                head = source.text.lstrip()
                if (self._format.at_start and head[:1] == "{") or head.startswith(self._names):
                    hits.append((len(source.text) - len(head), 0))
                waits = not source.ended and any(name.startswith(head) for name in self._names)
            n = min(hits)[0] if hits else 0 if waits else source.n_certain(openers)
            content = space + source.cut(n)
            kept = content.rstrip()
            space = content[len(kept) :]
            if kept and (self._begun or kept.strip()):
                yield kept
            if hits:
                source.restart()
                assert self._format.read is not None, "it has openers"
                is_fence = source.text.startswith(FENCE)
                is_marked = min(hits)[1] < 0 and not is_fence
                is_call = yield from self._format.read(self)
                if source.is_cut_off and (is_call or is_marked):
                    source.cut(len(source.text))
                elif is_call:
                    space = ""
                else:
                    self.n_fences += is_fence
                    yield space + (source.taken or source.cut(1))
                    space = ""
            elif source.ended:
                break
            else:
                yield None
        if space and not self.n_calls and self._begun:
            yield space
