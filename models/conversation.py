"""`Chat` stores a conversation in one slot, so each turn computes only new text.

Every turn renders the complete conversation, because a template may change earlier text. If the prompt begins
with the slot's text, only the new text is tokenized, because tokenizing the slot's text again could give
other tokens.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Unpack, cast

from vkbackend.checks import items, switch
from vkbackend.errors import InvalidArgument
from vkbackend.models.arguments import text_of, token_limit
from vkbackend.models.chats.messages import MessageImages, checked_messages
from vkbackend.models.chats.prompt import PromptMaker
from vkbackend.models.chats.request import structured
from vkbackend.models.engine.completion import Chunk, total
from vkbackend.models.generate_options import AnswerKeywords, GenerateOptions
from vkbackend.models.grammar.structure import KEYWORDS
from vkbackend.models.llm import LLM
from vkbackend.models.pictures import ImageTimes, Piece, PreparedImage, media_prompt, n_tokens
from vkbackend.models.text import reasoning
from vkbackend.models.text.chat_template import Message
from vkbackend.models.text.protection import Prompt
from vkbackend.models.vision.images import image_of
from vkbackend.options_class import takes


class Chat:
    """A conversation in `slot` of an LLM, with the `system` prompt. `template` is a jinja source or the name
    of one of the model's templates. The default is the model's default template, else ChatML. `notes` says if
    ChatML is used. The template gets `variables`, such as `tools` and `enable_thinking`.

    Special tokens in messages and documents are plain text, unless `parse_special`. `protected` is False if
    special tokens of messages cannot be distinguished from special tokens of the template.

    The first `n_left_out` of the `messages` after the system prompt are no longer in the context. `thinks` is
    True if the template opened a thought for the current answer. `channels` is True if answers are in
    Harmony.

    Raises UnsupportedModel for a model without a tokenizer, and InvalidArgument for an invalid template.
    """

    def __init__(
        self,
        llm: LLM,
        system: str | None = None,
        template: str | None = None,
        slot: int = 0,
        variables: Mapping[str, Any] | None = None,
        parse_special: bool = False,
    ) -> None:
        self._llm, self._slot = llm, slot
        for name, text in (("system", system), ("template", template)):
            if text is not None:
                text_of(name, text)
        self._variables = dict(variables or {})
        self._prompts = PromptMaker(
            llm.tokenizer,
            llm.chat_templates,
            template,
            tools=bool(self._variables.get("tools")),
            parse_special=switch("parse_special", parse_special),
        )
        self.notes, self.protected = self._prompts.notes, True
        self.channels = self._prompts.channels
        self._images = MessageImages()
        self._first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.thinks = False
        self.clear()

    def clear(self) -> None:
        """Forget all messages except the system prompt."""
        self.messages = list(self._first)
        self.n_left_out = 0
        self._text, self._ids = "", list[Piece]()  # a prefix of the slot's text
        self._images.by_key.clear()

    @takes(AnswerKeywords, GenerateOptions)
    def send(
        self,
        text: str,
        max_tokens: int | None = None,
        *,
        images: Sequence[Any] = (),
        **options: Unpack[AnswerKeywords],
    ) -> Generator[Chunk, None, None]:
        """Send a message and stream the answer. `images` precede the text: paths, bytes of files, data URLs,
        uint8 pixels [height, width, 3] or Pillow images. Accepts the keywords of `LLM.stream`, except `slot`.

        Closing the stream ends the answer; its text so far becomes a message. A message that is longer than
        the context, or refused by the template, raises InvalidArgument and is not stored.
        """
        content: str | list[dict[str, Any]] = text_of("text", text)
        if parts := items("images", images, "expected a list of images"):
            parts = [{"type": "image", "image": image_of(f"images[{i}]", x)} for i, x in enumerate(parts)]
            content = [*parts, {"type": "text", "text": text}]
        return self._ask([*self.messages, {"role": "user", "content": content}], max_tokens, options)

    @takes(AnswerKeywords, GenerateOptions)
    def regenerate(
        self, max_tokens: int | None = None, **options: Unpack[AnswerKeywords]
    ) -> Generator[Chunk, None, None]:
        """Replace the last answer. Raises InvalidArgument without a message to answer."""
        asked = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            raise InvalidArgument("there is no message to answer again; send one first")
        return self._ask(self.messages[: asked[-1] + 1], max_tokens, options)

    def _ask(
        self, messages: list[Message], max_tokens: int | None, options: AnswerKeywords
    ) -> Generator[Chunk, None, None]:
        most = token_limit("max_tokens", max_tokens)
        room = self._llm.n_ctx // 4 if most is None else min(most, self._llm.n_ctx // 4)
        times = ImageTimes()
        left_out, prompt, ids = self._fitting(messages, self.n_left_out, self._llm.n_ctx - room, times)
        if (structure := GenerateOptions.of(**options).structure) is not None:
            thinking = reasoning.opened(prompt.text)
            form = structured(self._prompts, structure, {}, thinking, several=False)
            options = cast(AnswerKeywords, {**options, **form})
        stream = self._llm.stream(media_prompt(ids, times), most, slot=self._slot, **options)
        self.n_left_out, self.protected = left_out, prompt.protected
        self.thinks = reasoning.opened(prompt.text)
        return self._answer(messages, prompt, ids, stream, most, options)

    def _answer(
        self,
        messages: list[Message],
        prompt: Prompt,
        ids: list[Piece],
        stream: Generator[Chunk, None, None],
        most: int | None,
        options: AnswerKeywords,
    ) -> Generator[Chunk, None, None]:
        chunks, before = list[Chunk](), list[dict[str, float]]()
        # If the answer has a grammar, a full context ends it, because a new request would restart the
        # grammar.
        slides = not any(options.get(name) for name in KEYWORDS)
        new_ids: list[int] = []
        try:
            while True:
                shorter = None
                with closing(stream):
                    for chunk in stream:
                        new_ids += [] if chunk.token is None else [chunk.token]
                        full = (
                            slides
                            and chunk.finish_reason == "length"
                            and (most is None or len(new_ids) < most)
                        )
                        if full and (shorter := self._shortened(messages, len(new_ids))):
                            before.append(chunk.timings or {})
                            chunk = replace(chunk, finish_reason=None, timings=None)
                        elif chunk.timings and before:
                            chunk = replace(chunk, timings=total([*before, chunk.timings]))
                        chunks.append(chunk)
                        yield chunk
                if shorter is None:
                    return
                self.n_left_out, prompt, ids = shorter
                left = None if most is None else most - len(new_ids)
                rest = media_prompt([*ids, *new_ids])
                stream = self._llm.stream(rest, left, slot=self._slot, **options)
        finally:
            answer = "".join(chunk.text for chunk in chunks)
            tokenizer = self._prompts.tokenizer
            if new_ids and new_ids[-1] in tokenizer.stop_ids:
                new_ids.pop()  # the template writes the token that ends a message
            self.messages = [*messages, answer_message(answer, self.thinks, self.channels)]
            # The answer's text lacks stop strings and incomplete characters, whose tokens are in `new_ids`.
            whole = tokenizer.decode(new_ids, at_start=False) == answer
            self._text, self._ids = (prompt.text + answer, [*ids, *new_ids]) if whole else ("", [])

    # ---- messages in the context ----

    def _shortened(self, messages: list[Message], n_made: int) -> tuple[int, Prompt, list[Piece]] | None:
        """Leave out older messages, so that an answer with `n_made` tokens can continue. Return `_fitting`'s
        result, or None if no older message can be left out."""
        older = self._older(messages, self.n_left_out)
        if older is None:
            return None
        fitting = self._fitting(messages, older, self._llm.n_ctx // 2 - n_made, ImageTimes())
        return fitting if n_tokens(fitting[2]) + n_made < self._llm.n_ctx else None

    def _fitting(
        self, messages: list[Message], left_out: int, most: int, times: ImageTimes
    ) -> tuple[int, Prompt, list[Piece]]:
        """Leave out messages until the prompt has at most `most` tokens. Return the number of messages left
        out, the prompt, and its ids.

        Half of the context becomes free, so the next turns do not compute the complete conversation again.
        """
        n_first = len(self._first)
        while True:
            seen = [*messages[:n_first], *messages[n_first + left_out :]]
            texts = checked_messages("messages", seen, self._images if self._llm.pictures else None)
            prompt = self._prompts.render(texts, self._variables)
            self._images.markers.check((message["content"] for message in texts), prompt.text)
            ids = self._encode(prompt, times)
            older = self._older(messages, left_out)
            if n_tokens(ids) <= most or older is None:
                return left_out, prompt, ids
            left_out, most = older, min(most, self._llm.n_ctx // 2)

    def _older(self, messages: list[Message], left_out: int) -> int | None:
        """Return how many messages are left out if one more exchange is dropped, or None if only the last
        exchange remains."""
        n_first = len(self._first)
        later = range(n_first + left_out + 1, len(messages))
        return next((i - n_first for i in later if messages[i]["role"] == "user"), None)

    def _encode(self, prompt: Prompt, times: ImageTimes) -> list[Piece]:
        if self._text and prompt.text.startswith(self._text) and (new := prompt.after(len(self._text))):
            rest = self._pieces(new, times, first=False)
            # Merges cannot cross a special token or an image.
            if rest and (not isinstance(rest[0], int) or self._prompts.tokenizer.is_marker(rest[0])):
                return [*self._ids, *rest]
        return self._pieces(prompt, times, first=True)

    def _pieces(self, prompt: Prompt, times: ImageTimes, first: bool) -> list[Piece]:
        markers, prepared = self._images.markers, dict[str, PreparedImage]()
        for *_, key in markers.places(prompt.text):
            assert self._llm.pictures is not None
            if key not in prepared:
                prepared[key] = self._llm.pictures.prepared(self._images.by_key[key], times, "images")
        pieces = self._prompts.pieces(prompt, markers, prepared)
        return self._prompts.with_bos(pieces) if first else pieces


def answer_message(answer: str, thinks: bool, channels: bool = False) -> Message:
    """Return an answer as a message. The thought is stored twice, under the key that Qwen's templates read
    and under the key that gpt-oss's template reads."""
    thought, content = reasoning.split(answer, thinks, channels)
    if not thought:
        return {"role": "assistant", "content": answer}
    return {
        "role": "assistant",
        "content": content.strip(),
        "reasoning_content": thought,
        "thinking": thought,
    }
