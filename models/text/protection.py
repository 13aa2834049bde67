"""Treats special tokens in the texts of users and tools as plain text. Otherwise a user could write
`<|im_end|>` to end a message and continue in another role.

The conversation is rendered again with a random sentinel next to each special token of these texts. The
sentinels show where the tokens are in the prompt. A template may test how contents begin and end. So the
sentinels are trusted only if the second rendering without them equals the first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

from vkbackend.errors import InvalidArgument
from vkbackend.models.text.chat_template import ChatTemplate, Message
from vkbackend.models.text.special_tokens import SpecialTokens
from vkbackend.models.text.tokenizer import Tokenizer, whole_characters

Spans = tuple[tuple[int, int], ...]
Change = Callable[[str, bool], str]  # (text, whether the model wrote it) -> text
TRUSTED = ("system", "developer")
# A message with this key is untrusted in any role, because it contains texts of tools.
UNTRUSTED = "_untrusted"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation. `plain` lists the spans of special tokens that are plain text. `protected` is
    False if these spans are unknown."""

    text: str
    plain: Spans = ()
    protected: bool = True

    def after(self, n: int) -> Prompt | None:
        """Return the prompt after its first `n` characters, or None if they end inside a plain span."""
        if any(begin < n < end for begin, end in self.plain):
            return None
        return self.part(n, len(self.text))

    def part(self, first: int, last: int) -> Prompt:
        """Return the characters from `first` to `last` - 1, with their plain spans."""
        spans = ((b - first, e - first) for b, e in self.plain if first <= b and e <= last)
        return Prompt(self.text[first:last], tuple(spans), self.protected)

    def __add__(self, other: Prompt) -> Prompt:
        n = len(self.text)
        spans = tuple((begin + n, end + n) for begin, end in other.plain)
        return Prompt(self.text + other.text, self.plain + spans, self.protected and other.protected)


class Protection:
    """Makes prompts in which special tokens of messages are plain text. User-defined tokens in `source`, the
    template's text, count as special tokens."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, source: str) -> None:
        self._template = template
        self._control = SpecialTokens(tokenizer.markers(lambda text: False))
        self._special = SpecialTokens(tokenizer.markers(lambda text: text in source))

    def prompt(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> Prompt:
        """Raises the errors of ChatTemplate.render."""
        texts: list[str] = []

        def collect(text: str, by_model: bool) -> str:
            if self._places(text := whole_characters(text), by_model):
                texts.append(text)
            return text

        conversation, given = changed(messages, variables, collect)
        text = self._template.render(conversation, **given)
        if not texts:
            return Prompt(text)
        # Sentinels after tokens succeed more often, because many templates test how a content begins.
        for after in (True, False):
            if spans := self._by_sentinels(conversation, given, text, after):
                return Prompt(text, spans)
        spans = _by_contents(texts, text)
        return Prompt(text, spans, protected=bool(spans))

    def _places(self, text: str, by_model: bool) -> list[tuple[int, int]]:
        return (self._control if by_model else self._special).places(text)

    def _by_sentinels(
        self, messages: Sequence[Message], variables: Mapping[str, Any], text: str, after: bool
    ) -> Spans:
        """Return the plain spans, or None if the sentinels changed the rendering or were moved."""
        code, marks = token_hex(8), list[str]()

        def mark(text: str, by_model: bool) -> str:
            out, done = "", 0
            for begin, end in self._places(text, by_model):
                sentinel, marked = f"\uf8f0{code}{len(marks):08x}\uf8f1", text[begin:end]
                marks.append(marked)
                out += text[done:begin] + (marked + sentinel if after else sentinel + marked)
                done = end
            return out + text[done:]

        conversation, given = changed(messages, variables, mark)
        try:
            parts = re.split(
                f"\uf8f0{code}([0-9a-f]{{8}})\uf8f1", self._template.render(conversation, **given)
            )
        except InvalidArgument:
            return ()
        if "".join(parts[::2]) != text:
            return ()
        spans, at = set[tuple[int, int]](), 0
        for part, index in zip(parts[::2], parts[1::2], strict=False):
            at += len(part)
            marked = marks[int(index, 16)]
            begin = at - len(marked) if after else at
            if begin < 0 or not text.startswith(marked, begin):
                return ()
            spans.add((begin, begin + len(marked)))
        return disjoint(spans)


def _by_contents(contents: list[str], text: str) -> Spans:
    """Return the spans of `contents` in `text`, or None if the numbers of occurrences differ."""
    spans = set[tuple[int, int]]()
    for content in set(contents):
        whole = content if content in text else content.strip()
        if not whole or text.count(whole) != contents.count(content):
            return ()
        spans |= {match.span() for match in re.finditer(re.escape(whole), text)}
    return disjoint(spans)


def disjoint(spans: set[tuple[int, int]]) -> Spans:
    out: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if out and begin < out[-1][1]:
            begin, end = out[-1][0], max(end, out.pop()[1])
        out.append((begin, end))
    return tuple(out)


def changed(
    messages: Sequence[Message], variables: Mapping[str, Any], change: Change
) -> tuple[list[Message], dict[str, Any]]:
    """Apply `change` to all untrusted texts."""

    def all_of(value: Any, by_model: bool) -> Any:
        if isinstance(value, str):
            return change(value, by_model)
        if isinstance(value, Mapping):
            return {key: all_of(item, by_model) for key, item in value.items()}
        return [all_of(item, by_model) for item in value] if isinstance(value, list | tuple) else value

    out: list[Message] = []
    for message in messages:
        role = message.get("role")
        trusted = role in TRUSTED and not message.get(UNTRUSTED)
        out.append(message if trusted else all_of(message, role == "assistant"))
    given = dict(variables)
    for name in ("documents", "tools"):
        if given.get(name) is not None:
            given[name] = all_of(given[name], False)
    return out, given
