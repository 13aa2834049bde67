"""Markers that represent images in the text of a conversation.

Chat templates know only texts, so a message contains a marker for each of its images. A marker has a random
code, so the text of a user cannot contain one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from secrets import token_hex

from vkbackend.errors import InvalidArgument


class Markers:
    """Equal keys (hexadecimal digits) have equal markers, so a later turn of a conversation has the same
    text."""

    def __init__(self) -> None:
        code = token_hex(8)
        self._begin = f"\uf8f2{code}"
        self._pattern = re.compile(f"\uf8f2{code}([0-9a-f]+)\uf8f3")

    def of(self, key: str) -> str:
        return f"{self._begin}{key}\uf8f3"

    def joined(self, texts: Sequence[str]) -> str:
        """Join the texts of a message's parts by line breaks, but not next to a marker, as llama.cpp does."""
        out = list(texts[:1])
        for before, text in pairwise(texts):
            out += [text] if self._is_marker(before) or self._is_marker(text) else ["\n", text]
        return "".join(out)

    def _is_marker(self, text: str) -> bool:
        return self._pattern.fullmatch(text) is not None

    def places(self, text: str) -> list[tuple[int, int, str]]:
        """Return (begin, end, key) of each marker."""
        return [(*match.span(), match[1]) for match in self._pattern.finditer(text)]

    def check(self, contents: Iterable[str], prompt: str) -> None:
        """Raise InvalidArgument if a template omitted or repeated markers of the messages' contents."""
        given = sorted(key for content in contents for *_, key in self.places(content))
        written = sorted(key for *_, key in self.places(prompt))
        if given != written:
            raise InvalidArgument(
                f"the chat template writes {len(written)} images of a conversation with {len(given)}; give "
                "another template (--chat-template-file, in Python `template`), or images in the last message"
            )
