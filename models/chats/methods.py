"""The methods of `LLM` that answer conversations. The caller stores the messages; the engine reuses their
cached prefix.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Unpack, overload

from vkbackend.models.arguments import continuation_count, token_limit
from vkbackend.models.chats.answer import ChatChunk, ChatCompletion
from vkbackend.models.chats.messages import MessageImages, checked_messages
from vkbackend.models.chats.options import ChatKeywords, ChatOptions
from vkbackend.models.chats.prepared_chat import PreparedChat
from vkbackend.models.chats.prompt import PromptMaker, PromptMakers
from vkbackend.models.chats.request import ChatRequest, Ids, chat_request
from vkbackend.models.engine.answers import Mailbox
from vkbackend.models.generate_options import GenerateKeywords
from vkbackend.models.generation import Generation
from vkbackend.models.pictures import ImageTimes, Pictures, media_prompt
from vkbackend.models.text.chat_template import Message
from vkbackend.models.text.protection import Prompt
from vkbackend.models.text.tokenizer import Tokenizer
from vkbackend.options_class import takes

Messages = Sequence[Mapping[str, Any]]


class Chats(ABC):
    chat_templates: Mapping[str, str]
    n_slots: int
    _apart: bool
    _makers: PromptMakers | None = None

    @property
    @abstractmethod
    def tokenizer(self) -> Tokenizer: ...

    @property
    @abstractmethod
    def pictures(self) -> Pictures | None: ...

    @abstractmethod
    def _open_mailbox(self) -> Mailbox: ...

    @abstractmethod
    def _generation(
        self, prompt: str | Sequence[int], max_tokens: int | None, options: GenerateKeywords
    ) -> Generation: ...

    @abstractmethod
    def _resumed(self, generation: Generation, tokens: Sequence[int]) -> Generation: ...

    @overload
    def chat(
        self, messages: Messages, max_tokens: int | None = None, *, n: None = None,
        **options: Unpack[ChatKeywords],
    ) -> ChatCompletion: ...  # fmt: skip

    @overload
    def chat(
        self, messages: Messages, max_tokens: int | None = None, *, n: int, **options: Unpack[ChatKeywords]
    ) -> list[ChatCompletion]: ...

    @takes(ChatKeywords, ChatOptions)
    def chat(
        self,
        messages: Messages,
        max_tokens: int | None = None,
        *,
        n: int | None = None,
        **options: Unpack[ChatKeywords],
    ) -> ChatCompletion | list[ChatCompletion]:
        """Answer a conversation of messages in OpenAI's format. The answer has separate fields for thought,
        content and tool calls. To continue the conversation, append `answer.message` to the messages.

        If `n` is set, return a list of n answers. Answer i uses seed + i. Special tokens in a message are
        plain text. Raises InvalidArgument, for example if the template refuses the messages; UnsupportedModel
        without a tokenizer; and the errors of `generate`.
        """
        chat = self.prepare_chat(messages, max_tokens, n=n, **options)
        if n is None:
            return chat.whole(list(chat.stream()))
        return chat.all(4 * self.n_slots)

    @takes(ChatKeywords, ChatOptions)
    async def achat(
        self,
        messages: Messages,
        max_tokens: int | None = None,
        *,
        n: int | None = None,
        **options: Unpack[ChatKeywords],
    ) -> ChatCompletion | list[ChatCompletion]:
        """`chat` for asyncio. Cancelling the task cancels its answers."""
        chat = await asyncio.to_thread(partial(self.prepare_chat, messages, max_tokens, n=n, **options))
        if n is None:
            return chat.whole([chunk async for chunk in chat.astream()])
        return await chat.aall(4 * self.n_slots)

    @takes(ChatKeywords, ChatOptions)
    def chat_stream(
        self, messages: Messages, max_tokens: int | None = None, **options: Unpack[ChatKeywords]
    ) -> Generator[ChatChunk, None, None]:
        """Stream the answer of `chat` as one ChatChunk per token. Arguments are checked immediately."""
        return self.prepare_chat(messages, max_tokens, **options).stream()

    @takes(ChatKeywords, ChatOptions)
    async def achat_stream(
        self, messages: Messages, max_tokens: int | None = None, **options: Unpack[ChatKeywords]
    ) -> AsyncGenerator[ChatChunk, None]:
        """`chat_stream` for asyncio. Arguments are checked when the first chunk is requested."""
        chat = await asyncio.to_thread(partial(self.prepare_chat, messages, max_tokens, **options))
        async with aclosing(chat.astream()) as chunks:
            async for chunk in chunks:
                yield chunk

    @takes(ChatKeywords, ChatOptions)
    def chat_prompt(self, messages: Messages, **options: Unpack[ChatKeywords]) -> ChatRequest:
        """Return the prompt that `chat` would send: `text` and `ids`."""
        return self._request(messages, ChatOptions.of(**options))

    def _request(self, messages: Messages, options: ChatOptions) -> ChatRequest:
        if self._makers is None:
            self._makers = PromptMakers(self.tokenizer, self.chat_templates)
        maker = self._makers.of(options)
        if self.pictures is None:
            return chat_request(maker, checked_messages("messages", messages), options)
        images = MessageImages()
        checked = checked_messages("messages", messages, images)
        return chat_request(maker, checked, options, partial(self._with_images, images, checked))

    def _with_images(
        self, images: MessageImages, messages: Sequence[Message], maker: PromptMaker, prompt: Prompt
    ) -> Ids:
        if not images.by_key:
            return maker.ids(prompt)
        assert self.pictures is not None
        images.markers.check((message["content"] for message in messages), prompt.text)
        times = ImageTimes()
        prepare, names = self.pictures.prepared, images.names
        prepared = {key: prepare(image, times, names[key]) for key, image in images.by_key.items()}
        return media_prompt(maker.with_bos(maker.pieces(prompt, images.markers, prepared)), times)

    def resume_chat(self, chat: PreparedChat, tokens: Sequence[int]) -> PreparedChat:
        """Return a chat that continues after `tokens`, because the engine of `chat` was lost. See
        `aresume`."""
        generation = self._resumed(chat.generations[0], tokens)
        return replace(chat, generations=[generation], mailbox=self._open_mailbox())

    @takes(ChatKeywords, ChatOptions)
    def prepare_chat(
        self, messages: Messages, max_tokens: int | None = None, *, n: int | None = None,
        **options: Unpack[ChatKeywords],
    ) -> PreparedChat:  # fmt: skip
        """Return the request that `chat` would send, to be streamed later. Any thread may call this
        method."""
        several = continuation_count("n", n) or 1
        most = token_limit("max_tokens", max_tokens)
        request = self._request(messages, ChatOptions.of(**options))
        generation = self._generation(request.ids, most, request.keywords)  # type: ignore[arg-type]
        generation = generation.for_reader(request.shown, request.single)
        mailbox = self._open_mailbox()
        return PreparedChat(request, generation.several(several), mailbox, self.tokenizer, self._apart)
