"""`LLM.chat` and its siblings: conversations that the caller keeps, answered one by one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from threading import Lock

from vkbackend.models.chats.answer import ChatChunk, ChatCompletion, chat_completion
from vkbackend.models.chats.options import ChatOptions
from vkbackend.models.chats.prompt import PromptMaker
from vkbackend.models.chats.request import ChatRequest
from vkbackend.models.engine.answers import Mailbox
from vkbackend.models.engine.completion import Chunk, Completion
from vkbackend.models.generation import Generation, arun_all, astream, completion, run_all, stream
from vkbackend.models.text.tokenizer import Tokenizer

MAX_KEPT = 4  # prompt makers: each has a process for its template


class PromptMakers:
    """The prompt makers in use, by template."""

    def __init__(self, tokenizer: Tokenizer, templates: Mapping[str, str]) -> None:
        self._tokenizer, self._templates = tokenizer, templates
        self._kept: OrderedDict[tuple[str | None, bool, bool], PromptMaker] = OrderedDict()
        self._lock = Lock()

    def of(self, options: ChatOptions) -> PromptMaker:
        key = options.template, bool(options.tools), options.parse_special
        made = self._kept.get(key)
        if made is None:  # outside the lock: to start its process takes time
            made = PromptMaker(self._tokenizer, self._templates, key[0], tools=key[1], parse_special=key[2])
        with self._lock:
            made = self._kept.setdefault(key, made)
            self._kept.move_to_end(key)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return made


@dataclass(frozen=True, slots=True)
class Chatting:
    """A conversation on its way through a model, answered once or several times."""

    request: ChatRequest
    generations: list[Generation]
    mailbox: Mailbox
    tokenizer: Tokenizer
    eager: bool = False  # the engine computes ahead anyway

    def stream(self) -> Generator[ChatChunk, None, None]:
        reader = self.request.reader()
        with closing(stream(self.mailbox, self.generations[0], self.tokenizer)) as chunks:
            for chunk in chunks:
                yield (one := reader.push(chunk))
                if one.finish_reason is not None:
                    return

    async def astream(self) -> AsyncGenerator[ChatChunk, None]:
        reader = self.request.reader()
        async with aclosing(self._achunks()) as chunks:
            async for chunk in chunks:
                yield (one := reader.push(chunk))
                if one.finish_reason is not None:
                    return

    def _achunks(self) -> AsyncGenerator[Chunk, None]:
        return astream(self.mailbox, self.generations[0], self.tokenizer, eager=self.eager)

    def whole(self, chunks: Sequence[ChatChunk]) -> ChatCompletion:
        """The answer that was streamed."""
        return chat_completion(chunks, completion(self.generations[0], [one.chunk for one in chunks]))

    def all(self, ahead: int) -> list[ChatCompletion]:
        return self._read(run_all(self.mailbox, self.generations, self.tokenizer, ahead))

    async def aall(self, ahead: int) -> list[ChatCompletion]:
        return self._read(await arun_all(self.mailbox, self.generations, self.tokenizer, ahead))

    def _read(self, done: Sequence[Completion]) -> list[ChatCompletion]:
        found = []
        for one in done:
            chunk = Chunk(one.text, None, one.finish_reason, one.timings, one.slot)
            found.append(chat_completion([self.request.reader().push(chunk)], one))
        return found
