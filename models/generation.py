"""Turns checked requests into messages for the engine, and the engine's answers into chunks of text."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vkbackend.models.engine.answers import Answers, Mailbox
from vkbackend.models.engine.async_answers import AsyncAnswers
from vkbackend.models.engine.cache.image_spans import Span
from vkbackend.models.engine.completion import Chunk, Completion, report
from vkbackend.models.engine.messages import Answer, Event, Generate, Logits
from vkbackend.models.generate_options import GenerateOptions
from vkbackend.models.prompt_logprobs import PromptLogprobs
from vkbackend.models.text.stop_text import StopText
from vkbackend.models.text.tokenizer import Tokenizer

MAX_SEED = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Generation:
    ids: tuple[int, ...]
    max_tokens: int | None
    options: GenerateOptions
    stop_ids: frozenset[int]
    echo: str = ""
    shown: frozenset[int] = frozenset()  # control tokens shown in the answer
    may_end: bool = False
    adapters: tuple[tuple[int, float], ...] = ()
    resumed: tuple[int, ...] = ()  # Tokens of a lost engine. Their chunks are repeated.
    images: tuple[Span, ...] = ()  # Rows of images have negative `ids`.
    image_times: Mapping[str, float] = field(default_factory=dict)  # as in ImageTimes.report

    @property
    def seed(self) -> int:
        assert self.options.seed is not None, "the check draws one"
        return self.options.seed

    def message(self, id_: int) -> Generate:
        options = self.options
        return Generate(
            id_,
            self.ids,
            self.max_tokens,
            options,
            self.stop_ids,
            options.slot,
            options.priority,
            options.deadline_s,
            timed=bool(options.stop) or self.may_end or options.timings_per_token,
            structure=options.structure,
            uses_cache=options.cache_prompt,
            reports_progress=options.prompt_progress,
            n_keep=options.n_keep or 0,
            n_discard=options.n_discard,
            adapters=self.adapters,
            draft_max=options.draft_max,
            resumed=self.resumed,
            images=self.images,
        )

    def for_reader(self, shown: frozenset[int], may_end: bool) -> Generation:
        return replace(self, shown=shown, may_end=may_end)

    def several(self, n: int) -> list[Generation]:
        """Return `n` copies with consecutive seeds, modulo 2**64."""
        seeds = [(self.seed + i) & MAX_SEED for i in range(n)]
        return [replace(self, options=replace(self.options, seed=seed)) for seed in seeds]


class Chunks:
    """`found` is True once a stop string has ended the text."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer | None) -> None:
        self._tokenizer, self._text = tokenizer, StopText(generation.options.stop)
        self._decoder = tokenizer.stream(at_start=False) if tokenizer else None
        self._slot, self._shown = 0, generation.shown
        self._image_times = generation.image_times
        self._timed = generation.options.timings_per_token
        self._is_plain = not (generation.options.stop or self._shown)

    @property
    def found(self) -> bool:
        return self._text.found

    def push(self, answer: Answer) -> Chunk:
        if isinstance(answer, int):
            if self._is_plain and self._decoder and answer < self._tokenizer.n_vocab:  # type: ignore[union-attr]
                return Chunk(self._decoder.push(answer), answer, None, None, self._slot)
            event, token = None, answer
        else:
            event, token, self._slot = answer, answer.token, answer.slot or 0  # type: ignore[assignment]
        done = event is not None and event.done
        piece = ""
        # An embedding table may have more rows than the vocabulary has tokens. The extra ids have no text.
        if self._decoder and token is not None and token < self._tokenizer.n_vocab:  # type: ignore[union-attr]
            piece = self._decoder.push(token)
            if token in self._shown:
                piece = self._decoder.flush() + self._tokenizer.piece(token).decode()  # type: ignore[union-attr]
        if self._decoder and done:
            piece += self._decoder.flush()
        piece = self._text.push(piece, last=done)
        reason = "stop" if self._text.found else event.finish_reason if event else None
        is_timed = reason or (self._timed and token is not None)
        timings = {**_timings(event), **self._image_times} if is_timed else None
        logprobs, progress = (event.logprobs, event.progress) if event else (None, None)
        n_discarded = event.n_discarded if event else 0
        return Chunk(piece, token, reason, timings, self._slot, logprobs, None, progress, n_discarded)


def _timings(event: Event | None) -> dict[str, float]:
    return report(event.timings if event else None)


def completion(generation: Generation, chunks: Sequence[Chunk]) -> Completion:
    last, asked = chunks[-1], generation.options.logprobs
    assert last.finish_reason is not None and last.timings is not None
    return Completion(
        text="".join(chunk.text for chunk in chunks),
        tokens=[chunk.token for chunk in chunks if chunk.token is not None],
        finish_reason=last.finish_reason,
        timings=last.timings,
        prompt_tokens=list(generation.ids),
        seed=generation.seed,
        slot=last.slot,
        logprobs=None if asked is None else [chunk.logprobs for chunk in chunks if chunk.logprobs],
        prompt_logprobs=chunks[0].prompt_logprobs,
        truncated=last.truncated,
    )


def prompt_chunks(mailbox: Mailbox, generation: Generation) -> list[Chunk]:
    scores = PromptLogprobs.of(generation.ids, generation.options.prompt_logprobs)
    if scores:
        for event in mailbox.ask(
            lambda id_: Logits(id_, generation.ids, adapters=generation.adapters), eager=True
        ).events():
            scores.push(event.logits)
    return _prompt_chunks(generation, scores)


async def aprompt_chunks(mailbox: Mailbox, generation: Generation) -> list[Chunk]:
    scores = PromptLogprobs.of(generation.ids, generation.options.prompt_logprobs)
    if scores:
        async for event in AsyncAnswers(
            mailbox, lambda id_: Logits(id_, generation.ids, adapters=generation.adapters), eager=True
        ):
            assert isinstance(event, Event)
            scores.push(event.logits)
    return _prompt_chunks(generation, scores)


def _prompt_chunks(generation: Generation, scores: PromptLogprobs | None) -> list[Chunk]:
    if not scores and not generation.options.echo:
        return []
    return [Chunk(generation.echo, None, prompt_logprobs=scores.logprobs if scores else None)]


def stream(
    mailbox: Mailbox, generation: Generation, tokenizer: Tokenizer | None
) -> Generator[Chunk, None, None]:
    yield from prompt_chunks(mailbox, generation)
    answers, chunks = mailbox.ask(generation.message, eager=False), Chunks(generation, tokenizer)
    try:
        for answer in answers:
            yield chunks.push(answer)
            if chunks.found:
                return
    finally:
        answers.close()


async def astream(
    mailbox: Mailbox, generation: Generation, tokenizer: Tokenizer | None, *, eager: bool = False
) -> AsyncGenerator[Chunk, None]:
    for chunk in await aprompt_chunks(mailbox, generation):
        yield chunk
    answers, chunks = AsyncAnswers(mailbox, generation.message, eager=eager), Chunks(generation, tokenizer)
    try:
        for token in generation.resumed:
            yield chunks.push(token)
        async for answer in answers:
            yield chunks.push(answer)
            if chunks.found:
                return
    finally:
        answers.close()


@dataclass(frozen=True, slots=True)
class Batch:
    """Generations that are requested together, with `n` continuations per prompt."""

    generations: list[Generation]
    is_list: bool
    n: int | None

    def shaped(self, done: list[Completion]) -> Any:
        if self.n is None:
            return done if self.is_list else done[0]
        rows = [done[i : i + self.n] for i in range(0, len(done), self.n)]
        return rows if self.is_list else rows[0]


def are_prompts(prompt: object) -> bool:
    return (
        isinstance(prompt, list | tuple)
        and bool(prompt)
        and isinstance(prompt[0], str | list | tuple | np.ndarray | Mapping)
    )


def run_all(
    mailbox: Mailbox, generations: Sequence[Generation], tokenizer: Tokenizer | None, ahead: int
) -> list[Completion]:
    """While one completion is read, up to `ahead` other generations run."""
    done: list[Completion] = []
    posted: deque[tuple[Generation, Answers]] = deque()
    left = iter(generations)
    try:
        while True:
            while len(posted) <= ahead and (generation := next(left, None)) is not None:
                # without stop strings, the caller needs every token
                eager = not generation.options.stop or len(generations) > 1
                posted.append((generation, mailbox.ask(generation.message, eager=eager)))
            if not posted:
                return done
            generation, answers = posted.popleft()
            chunks = Chunks(generation, tokenizer)
            try:
                read = prompt_chunks(mailbox, generation)
                for answer in answers:
                    read.append(chunks.push(answer))
                    if chunks.found:
                        break
            finally:
                answers.close()
            done.append(completion(generation, read))
    finally:
        for _, answers in posted:
            answers.close()


async def arun_all(
    mailbox: Mailbox, generations: Sequence[Generation], tokenizer: Tokenizer | None, ahead: int
) -> list[Completion]:
    """If a generation fails or the caller is cancelled, the others are cancelled."""
    room = asyncio.Semaphore(1 + ahead)

    async def one(generation: Generation) -> Completion:
        async with room:
            eager = not generation.options.stop or len(generations) > 1
            chunks = astream(mailbox, generation, tokenizer, eager=eager)
            return completion(generation, [chunk async for chunk in chunks])

    tasks = [asyncio.ensure_future(one(generation)) for generation in generations]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
