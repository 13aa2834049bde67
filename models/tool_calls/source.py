"""Text that arrives in pieces, and generators that read it. Generators yield an answer's parts, or None to
get more text."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from vkbackend.models.text.stop_text import overlap


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A part of a tool call. The first part contains the id and name; later parts contain the arguments as
    pieces of JSON text."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


AnswerPart = str | ToolDelta
Reading = Generator[AnswerPart | None, None, None]
Trying = Generator[AnswerPart | None, None, bool]


class Source:
    """`text` is not read yet. `ended` is True if no more text will come. `was_cut` is True if a token limit
    ended the text. `taken` is the text read since `restart`. `ran_out` is True if a generator needed more
    text after the end."""

    def __init__(self) -> None:
        self.text, self.taken, self.ended, self.was_cut, self.ran_out = "", "", False, False, False

    @property
    def is_cut_off(self) -> bool:
        return self.was_cut and self.ran_out

    def restart(self) -> None:
        self.taken, self.ran_out = "", False

    def cut(self, n: int) -> str:
        head, self.text = self.text[:n], self.text[n:]
        self.taken += head
        return head

    def put_back(self, text: str) -> None:
        """Undo the last read, which returned `text`."""
        self.text, self.taken = text + self.text, self.taken[: len(self.taken) - len(text)]

    def wait(self) -> Generator[None, None, bool]:
        """Wait for more text. Return False after the end."""
        if self.ended:
            self.ran_out = True
            return False
        yield None
        return True

    def skip_space(self) -> Reading:
        while True:
            self.cut(len(self.text) - len(self.text.lstrip()))
            if self.text or not (yield from self.wait()):
                return

    def begins(self, *marks: str) -> Generator[None, None, str | None]:
        """Read and return the longest mark that begins the text, or return None."""
        while True:
            for mark in sorted(marks, key=len, reverse=True):
                if self.text.startswith(mark):
                    return self.cut(len(mark))
            if not any(mark.startswith(self.text) for mark in marks) or not (yield from self.wait()):
                return None

    def until(self, *marks: str) -> Generator[None, None, tuple[str, str]]:
        """Read and return the text up to the first mark, and the mark. Without a mark, return all text and
        ""."""
        while True:
            if hits := [(at, -len(m), m) for m in marks if (at := self.text.find(m)) >= 0]:
                at, _, mark = min(hits)
                return self.cut(at), self.cut(len(mark))
            if not (yield from self.wait()):
                return self.cut(len(self.text)), ""

    def n_certain(self, marks: Sequence[str]) -> int:
        return len(self.text) - (0 if self.ended else max((overlap(self.text, m) for m in marks), default=0))


class JsonEnd:
    """Finds the end of a JSON object or array. At the start, `depth` levels are open."""

    _NEXT, _IN_STRING = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._in_string, self._skip = depth, False, 0

    def push(self, text: str) -> int | None:
        """Add text. Return how many characters of `text` precede the value's end, or None if the value
        continues."""
        at = self._skip
        while True:
            match = (self._IN_STRING if self._in_string else self._NEXT).search(text, at)
            if match is None:
                self._skip = max(0, at - len(text))
                return None
            at, character = match.end(), match[0]
            if character == "\\":
                at += 1
            elif character == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if character in "{[" else -1
                if self._depth <= 0:
                    return at
