"""A chat request with its prompt, ready to run on a model's engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass

from vkbackend.models.chats.answer import ChatChunk, ChatCompletion, chat_completion
from vkbackend.models.chats.request import ChatRequest
from vkbackend.models.engine.answers import Mailbox
from vkbackend.models.engine.completion import Chunk, Completion
from vkbackend.models.generation import Generation, arun_all, astream, completion, run_all, stream
from vkbackend.models.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PreparedChat:
    request: ChatRequest
    generations: list[Generation]
    mailbox: Mailbox
    tokenizer: Tokenizer
    eager: bool = False  # Compute answers before the caller asks.

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens of the prompt. Rows of images have negative ids."""
        return self.generations[0].ids

    def stream(self) -> Generator[ChatChunk, None, None]:
        reader = self.request.reader()
        with closing(stream(self.mailbox, self.generations[0], self.tokenizer)) as chunks:
            for chunk in chunks:
                yield (answer := reader.push(chunk))
                if answer.finish_reason is not None:
                    return

    async def astream(self) -> AsyncGenerator[ChatChunk, None]:
        reader = self.request.reader()
        async with aclosing(self._achunks()) as chunks:
            async for chunk in chunks:
                yield (answer := reader.push(chunk))
                if answer.finish_reason is not None:
                    return

    def _achunks(self) -> AsyncGenerator[Chunk, None]:
        return astream(self.mailbox, self.generations[0], self.tokenizer, eager=self.eager)

    def whole(self, chunks: Sequence[ChatChunk]) -> ChatCompletion:
        return chat_completion(chunks, completion(self.generations[0], [chunk.chunk for chunk in chunks]))

    def all(self, ahead: int) -> list[ChatCompletion]:
        return self._read(run_all(self.mailbox, self.generations, self.tokenizer, ahead))

    async def aall(self, ahead: int) -> list[ChatCompletion]:
        return self._read(await arun_all(self.mailbox, self.generations, self.tokenizer, ahead))

    def _read(self, completions: Sequence[Completion]) -> list[ChatCompletion]:
        answers = []
        for answer in completions:
            reason, timings = answer.finish_reason, answer.timings
            chunk = Chunk(answer.text, None, reason, timings, answer.slot)
            answers.append(chat_completion([self.request.reader().push(chunk)], answer))
        return answers
