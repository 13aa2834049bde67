"""Separates tool calls from the text around them while the text arrives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vkbackend.models.tool_calls.calls import CallReader
from vkbackend.models.tool_calls.formats import ToolFormat
from vkbackend.models.tool_calls.source import AnswerPart, Reading


class ToolReader(CallReader):
    """Splits an answer into content and calls. White space around calls is dropped. An incomplete or invalid
    call is content."""

    def __init__(self, format_: ToolFormat, tools: Mapping[str, Any]) -> None:
        super().__init__(tools)
        self._format, self._begun = format_, False
        self._reading = self._read()
        self._is_over = False

    def push(self, piece: str, *, last: bool = False) -> list[AnswerPart]:
        """Add a piece, and return the content and calls that later text cannot change."""
        self.source.text += piece
        self.source.ended |= last
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
        source, openers = self.source, self._format.openers
        space = ""  # White space after the content, which is returned if more content follows.
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
                else:
                    yield space + (source.taken or source.cut(1))
                    space = ""
            elif source.ended:
                break
            else:
                yield None
        if space and not self.n_calls and self._begun:
            yield space
