"""A conversation with a model: `Chat` keeps it in one slot, so that a turn computes only what is new.

The whole conversation goes through the template at every turn, as templates may look back. Where its text
goes on from what the slot holds, the tokens that the model made stay: made from their text again they could
be cut differently.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Unpack

from vkbackend.models.arguments import text_of
from vkbackend.models.engine.completion import Chunk
from vkbackend.models.llm import LLM
from vkbackend.models.options import AnswerKeywords, GenerateOptions
from vkbackend.models.text.chat_template import ChatTemplate, Message, required
from vkbackend.options import takes


class Chat:
    """One conversation in `slot` of an LLM. `system` is what it is told first; `template` is a jinja source
    (None: the model's own).

    Raises UnsupportedModel without a tokenizer or a template, InvalidArgument for one that is not valid.
    """

    def __init__(
        self, llm: LLM, system: str | None = None, template: str | None = None, slot: int = 0
    ) -> None:
        self._llm, self._slot, self._tokenizer = llm, slot, llm.tokenizer
        for name, text in (("system", system), ("template", template)):
            if text is not None:
                text_of(name, text)
        special = (self._tokenizer.bos_id, self._tokenizer.eos_id)
        bos, eos = ("" if i is None else self._tokenizer.piece(i).decode(errors="replace") for i in special)
        source = required(llm.chat_template if template is None else template)
        self._template = ChatTemplate(source, bos, eos)
        self._first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.clear()

    def clear(self) -> None:
        """Forget all but the system prompt."""
        self.messages = list(self._first)
        self._text, self._ids = "", list[int]()  # a beginning of what the slot holds

    @takes(AnswerKeywords, GenerateOptions)
    def send(
        self, text: str, max_tokens: int | None = None, **options: Unpack[AnswerKeywords]
    ) -> Generator[Chunk, None, None]:
        """Say `text` and stream the answer; the keywords are those of `LLM.stream`, without the slot.

        Closing the stream ends the answer, and what was said of it stays. A message that the context does not
        hold any more, or that the template refuses, raises InvalidArgument here and is forgotten.
        """
        messages: list[Message] = [*self.messages, {"role": "user", "content": text_of("text", text)}]
        prompt = self._template.render(messages)
        ids = self._encode(prompt)
        return self._answer(
            messages, prompt, ids, self._llm.stream(ids, max_tokens, slot=self._slot, **options)
        )

    def _answer(
        self, messages: list[Message], prompt: str, ids: list[int], stream: Generator[Chunk, None, None]
    ) -> Generator[Chunk, None, None]:
        chunks: list[Chunk] = []
        try:
            with closing(stream):
                for chunk in stream:
                    chunks.append(chunk)
                    yield chunk
        finally:
            answer = "".join(chunk.text for chunk in chunks)
            made = [chunk.token for chunk in chunks if chunk.token is not None]
            if made and made[-1] in self._tokenizer.stop_ids:
                made.pop()  # the template writes what ends a message
            self.messages = [*messages, {"role": "assistant", "content": answer}]
            # Bytes of half a character, or a stop string, are in the tokens and not in the text.
            whole = self._tokenizer.decode(made, at_start=False) == answer
            self._text, self._ids = (prompt + answer, ids + made) if whole else ("", [])

    def _encode(self, prompt: str) -> list[int]:
        """Ids of a rendered conversation, with the BOS that the model wants and a template may leave out."""
        tok = self._tokenizer
        if self._text and prompt.startswith(self._text):
            rest = tok.encode(prompt[len(self._text) :], add_special=False, parse_special=True)
            if rest and tok.is_marker(rest[0]):  # else it may belong to the same word
                return self._ids + rest
        ids = tok.encode(prompt, add_special=False, parse_special=True)
        if tok.add_bos and tok.bos_id is not None and ids[:1] != [tok.bos_id]:
            ids.insert(0, tok.bos_id)
        return ids
