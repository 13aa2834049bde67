"""Harmony, the format of gpt-oss (https://github.com/openai/harmony). Each message has a header that names
the channel and the recipient.

<|channel|>analysis<|message|>...<|end|><|start|>assistant to=functions.f<|channel|>commentary
json<|message|>...
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vkbackend.models.text.stop_text import overlap

ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
MARKS = (*ENDS, "<|message|>", "<|constrain|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_HEADERS = ("<|", " to=", "to=", "assistant")  # A header begins with one of these.


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a message. `recipient` is the function of a tool call. `begins` marks a message's first
    piece, which may be empty."""

    text: str
    is_thought: bool
    recipient: str = ""
    begins: bool = False


class HarmonyReader:
    """Splits the text after `<|start|>assistant` into messages. Text without a header is the answer."""

    def __init__(self) -> None:
        self._held, self._in_header, self._plain = "", True, True
        self._thought, self._recipient = False, ""

    def push(self, piece: str, *, last: bool = False) -> list[Part]:
        self._held += piece
        out: list[Part] = []
        while self._held:
            if not (self._header(out, last) if self._in_header else self._body(out, last)):
                break
        return out

    def _header(self, out: list[Part], last: bool) -> bool:
        """Read the next header or text, or return False if more text is needed."""
        if self._plain:  # The first message may have no header.
            begun = any(self._held.startswith(mark) for mark in _HEADERS)
            may = any(mark.startswith(self._held) for mark in _HEADERS)
            if not begun and not (may and not last):
                self._in_header = self._plain = False
                return True
            if not begun:
                return False
        at = self._held.find("<|message|>")
        if at < 0:
            if last:
                self._held = ""
            return False
        header, self._held = self._held[:at], self._held[at + len("<|message|>") :]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._recipient = recipient[1] if recipient and recipient[1] != "assistant" else ""
        self._thought = channel is not None and channel[1] == "analysis"
        if self._recipient and not self._recipient.startswith("functions."):
            self._recipient, self._thought = "", True  # a built-in tool (python)
        self._in_header = self._plain = False
        out.append(Part("", self._thought, self._recipient, begins=True))
        return True

    def _body(self, out: list[Part], last: bool) -> bool:
        hits = [(at, mark) for mark in ENDS if (at := self._held.find(mark)) >= 0]
        n = min(hits)[0] if hits else len(self._held)
        if not hits and not last:
            n -= max(overlap(self._held, mark) for mark in ENDS)
        text, self._held = self._held[:n], self._held[n:]
        if text:
            out.append(Part(text, self._thought, self._recipient))
        if not hits:
            return False
        mark = min(hits)[1]
        if mark != "<|channel|>":  # "<|channel|>" is part of the next header.
            self._held = self._held[len(mark) :]
        self._in_header = True
        return True
