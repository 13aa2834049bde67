"""Turns a conversation into the tokens of a prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import Any, TypeVar

from vkbackend.models.chats.options import ChatOptions
from vkbackend.models.pictures import Piece, PreparedImage
from vkbackend.models.prompt_pieces import pieces_of
from vkbackend.models.text.chat_template import ChatTemplate, Message, choose
from vkbackend.models.text.markers import Markers
from vkbackend.models.text.protection import Prompt, Protection
from vkbackend.models.text.reasoning import MARKS, has_channels
from vkbackend.models.text.tokenizer import Tokenizer
from vkbackend.models.tool_calls.formats import ToolFormat, format_of

MAX_KEPT = 4  # each has a process
P = TypeVar("P", int, Piece)


class PromptMaker:
    """`template` is a jinja source, or the name of one of the model's `templates`. `choose` selects the
    default. If the default is ChatML, `notes` reports this. Raises InvalidArgument for an invalid template.

    Special tokens in messages are plain text, unless `parse_special`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Mapping[str, str],
        template: str | None = None,
        *,
        tools: bool = False,
        parse_special: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        special = (tokenizer.bos_id, tokenizer.eos_id)
        bos, eos = ("" if i is None else tokenizer.piece(i).decode(errors="replace") for i in special)
        self.source, self.notes = choose(templates, template, tools)
        self._template = ChatTemplate(self.source, bos, eos)
        self._parse_special = parse_special

    @cached_property
    def _protection(self) -> Protection:
        return Protection(self._template, self.tokenizer, self.source)

    @cached_property
    def channels(self) -> bool:
        return has_channels(self.source)

    @cached_property
    def tool_format(self) -> ToolFormat:
        return format_of(self.source)

    @cached_property
    def shown(self) -> frozenset[int]:
        texts = {*MARKS, *self.tool_format.marks}
        return frozenset(i for text, i in self.tokenizer.markers(lambda _: False) if text in texts)

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> Prompt:
        """Raises the errors of ChatTemplate.render."""
        if self._parse_special:
            return Prompt(self._template.render(messages, **variables))
        return self._protection.prompt(messages, variables)

    def ids(self, prompt: Prompt) -> list[int]:
        """Return the prompt's tokens. Add BOS if the model wants it and the template does not write it."""
        return self.with_bos(self.tokenizer.encode(prompt.text, False, True, prompt.plain))

    def pieces(self, prompt: Prompt, markers: Markers, images: Mapping[str, PreparedImage]) -> list[Piece]:
        """Return the prompt's tokens without BOS, with the rows of `images` (by key) in place of their
        markers."""
        places = [(begin, end, images[key]) for begin, end, key in markers.places(prompt.text)]
        return pieces_of(self.tokenizer, prompt, places)

    def with_bos(self, pieces: list[P]) -> list[P]:
        tok = self.tokenizer
        if tok.add_bos and tok.bos_id is not None and pieces[:1] != [tok.bos_id]:
            return [tok.bos_id, *pieces]  # type: ignore[list-item]
        return pieces

    @cached_property
    def text_arguments(self) -> bool:
        """True if a tool call's arguments must be JSON text, because the template does not write a dict as
        JSON."""
        call = {"name": "f", "arguments": {"probed": [1]}}
        asked = {"role": "user", "content": "x"}
        messages: list[Message] = [asked, {"role": "assistant", "content": "", "tool_calls": [
            {"id": "abcdefghi", "type": "function", "function": call, "name": "f"}]}]  # fmt: skip
        try:
            text = self._template.render(messages)
        except Exception:
            return True
        return "'probed'" in text


class PromptMakers:
    def __init__(self, tokenizer: Tokenizer, templates: Mapping[str, str]) -> None:
        self._tokenizer, self._templates = tokenizer, templates
        self._kept: OrderedDict[tuple[str | None, bool, bool], PromptMaker] = OrderedDict()
        self._lock = Lock()

    def of(self, options: ChatOptions) -> PromptMaker:
        key = options.template, bool(options.tools), options.parse_special
        maker = self._kept.get(key)
        if maker is None:  # Done without the lock, because PromptMaker starts a process.
            maker = PromptMaker(self._tokenizer, self._templates, key[0], tools=key[1], parse_special=key[2])
        with self._lock:
            maker = self._kept.setdefault(key, maker)
            self._kept.move_to_end(key)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return maker
