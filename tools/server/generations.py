from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from vkbackend.checks import refused
from vkbackend.errors import InvalidArgument
from vkbackend.models.arguments import token_ids
from vkbackend.models.chats.answer import ChatChunk
from vkbackend.models.engine.completion import Chunk
from vkbackend.models.engine.messages import PromptProgress, check_tokens
from vkbackend.models.llm import LLM
from vkbackend.models.pictures import MediaPrompt, check_pixels
from vkbackend.models.prompt_pieces import read_media_prompt
from vkbackend.models.sampling.params import MAX_SEED
from vkbackend.models.vision.images import image_of_base64
from vkbackend.tools.server.body import Fields

SHORT_TEXT = 4096  # Tokenizing this many characters takes 1 ms. A thread tokenizes longer texts.
PROMPT = "expected a string, a list of token ids, or a list of such prompts"
Piece = Chunk | ChatChunk
Ids = list[int] | MediaPrompt
MAX_IMAGES = 16
EAGER_CHUNKS = 64  # A request's queue has at most this many chunks.


@dataclass(slots=True)
class Job:
    """A sequence to generate. `index` is the job's position among the answer's choices. Rows of images have
    negative ids."""

    ids: Ids
    max_tokens: int | None
    options: dict[str, Any]
    text: str | None = None  # a prompt string
    index: int = 0

    def start(self, llm: LLM) -> AsyncGenerator[Piece, None]:
        if self.options.get("seed") in (None, -1):  # A resumed answer needs the same seed.
            self.options = self.options | {"seed": secrets.randbelow(MAX_SEED)}
        return llm.astream(self.ids, self.max_tokens, **self.options)

    def resume(self, llm: LLM, tokens: Sequence[int]) -> AsyncGenerator[Piece, None]:
        """Continue after the loss of another engine, which generated `tokens`. Their pieces are repeated."""
        generation = llm.generation(self.ids, self.max_tokens, **self.options)
        return llm.aresume(generation, tokens)


@dataclass(slots=True)
class Tally:
    prompt_n: int
    n_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    timings: dict[str, float] = field(default_factory=dict)
    slot: int = 0
    progress: PromptProgress | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    n_discarded: int = 0  # Tokens that context shifts have discarded.
    is_known: bool = False  # Is in `Service.running`.

    def add(self, piece: Piece) -> None:
        chunk = raw_chunk(piece)
        if chunk.token is not None:
            self.n_tokens += 1
            self.tokens.append(chunk.token)
        self.slot, self.n_discarded = chunk.slot, max(self.n_discarded, chunk.n_discarded)
        if chunk.timings:
            self.timings = chunk.timings
        if chunk.progress is not None:
            self.progress = chunk.progress
        self.finish_reason = chunk.finish_reason or self.finish_reason

    @property
    def cached_n(self) -> int:
        """The number of prompt tokens from the cache, or 0 if a preempted sequence computed tokens twice."""
        if self.progress is not None:
            return self.progress.cached
        computed = int(self.timings.get("prompt_n", self.prompt_n))
        return max(0, self.prompt_n - computed)


def raw_chunk(piece: Piece) -> Chunk:
    return piece if isinstance(piece, Chunk) else piece.chunk


J = TypeVar("J", bound=Job)

# ---- prompts ----


async def tokenize(llm: LLM, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
    def encode() -> list[int]:
        return llm.tokenize(text, add_special=add_special, parse_special=parse_special)

    return encode() if len(text) <= SHORT_TEXT else await asyncio.to_thread(encode)


def media_of(llm: LLM, fields: Fields) -> Ids:
    """Return a prompt with images, whose files are in base64. Raises InvalidArgument."""
    fields.required("prompt_string")
    name = fields.name("multimodal_data")
    images = [image_of_base64(f"{name}[{i}]", text)
              for i, text in enumerate(fields.items("multimodal_data", MAX_IMAGES))]  # fmt: skip
    prompt = {"prompt_string": fields.text("prompt_string", ""), "multimodal_data": images}
    return read_media_prompt(llm.tokenizer, llm.pictures, prompt)


async def prompt_of(llm: LLM, name: str, value: Any) -> tuple[Ids, str | None]:
    """Return the token ids of a prompt, and its text if it is a string. A list may mix strings and token
    ids."""
    if isinstance(value, str):
        return await tokenize(llm, value), value
    if isinstance(value, dict):
        if not value.get("multimodal_data"):
            return await prompt_of(llm, name, value.get("prompt_string"))
        media = await asyncio.to_thread(media_of, llm, Fields(value, f"{name}."))
        return media, value["prompt_string"]
    if not isinstance(value, list):
        raise refused(name, value, PROMPT)
    if len(value) > llm.n_ctx:  # a body of 8 MiB may have four million tokens
        check_tokens([0] * len(value), llm.n_vocab, llm.n_ctx)
    if not any(isinstance(part, str) for part in value):
        return list(token_ids(name, value, PROMPT)), None
    ids: list[int] = []
    for i, part in enumerate(value):
        if isinstance(part, str):
            ids += await tokenize(llm, part, add_special=i == 0)
        else:
            ids += token_ids(name, [part], PROMPT)
    return ids, None


async def prompts_of(llm: LLM, name: str, value: Any, most: int) -> tuple[list[tuple[Ids, str | None]], bool]:
    """Return the prompts of a field, and whether the field is a list of prompts."""
    is_list = isinstance(value, list) and bool(value) and _are_prompts(value)
    parts = value if is_list else [value]
    if len(parts) > most:
        raise InvalidArgument(f"{name} has {len(parts)} prompts, at most {most} are allowed", argument=name)
    given = [part.get("multimodal_data") for part in parts if isinstance(part, dict)]
    if (n := sum(len(images) for images in given if isinstance(images, list))) > MAX_IMAGES:
        raise InvalidArgument(f"{name}: {n} images, at most {MAX_IMAGES} are allowed", argument=name)
    prompts, n_pixels = list[tuple[Ids, str | None]](), 0
    for part in parts:
        prompts.append(await prompt_of(llm, name, part))
        if isinstance(ids := prompts[-1][0], MediaPrompt):
            n_pixels += ids.times.n_pixels
            check_pixels(n_pixels)
    for ids, _ in prompts:
        check_tokens([0] * len(ids) if isinstance(ids, MediaPrompt) else ids, llm.n_vocab, llm.n_ctx)
    return prompts, is_list


def _are_prompts(value: Sequence[Any]) -> bool:
    """Return whether a list consists of prompts. The list [1, "a"] is a single prompt."""
    return all(isinstance(part, str) for part in value) or any(
        isinstance(part, list | dict) for part in value
    )


def several(job: Job, n: int) -> list[Job]:
    seed = job.options.get("seed")
    jobs = []
    for i in range(n):
        options = dict(job.options)
        if seed is not None and seed >= 0:
            options["seed"] = (seed + i) & MAX_SEED
        jobs.append(replace(job, options=options))
    return jobs


# ---- chunks ----


Run = Callable[[Any], AsyncGenerator[Piece, None]]


async def merged(run: Run, jobs: Sequence[J]) -> AsyncGenerator[tuple[J, Piece], None]:
    """Yield the chunks of all jobs as they arrive. If a job fails, end all jobs."""
    queue: asyncio.Queue[tuple[J, Piece | BaseException | None]] = asyncio.Queue(EAGER_CHUNKS)

    async def read(job: J) -> None:
        try:
            async with aclosing(run(job)) as chunks:
                async for chunk in chunks:
                    await queue.put((job, chunk))
            await queue.put((job, None))
        except Exception as error:
            await queue.put((job, error))

    tasks = [asyncio.ensure_future(read(job)) for job in jobs]
    try:
        left = len(jobs)
        while left:
            job, event = await queue.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                left -= 1
            else:
                yield job, event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ---- results ----


def token_text(llm: LLM, token: int) -> str:
    return llm.tokenizer.piece(token).decode("utf-8", "replace")


def stop_met(llm: LLM, tally: Tally, text: str, stops: Sequence[str]) -> str:
    if not stops:
        return ""
    rest = llm.tokenizer.decode(tally.tokens, at_start=False)[len(text) :]
    return next((stop for stop in stops if rest.startswith(stop)), "")


def usage_of(tallies: Sequence[Tally], n_prompt: int) -> dict[str, Any]:
    """Return OpenAI's `usage`. `n_prompt` counts a prompt's tokens once for all its answers."""
    n_generated = sum(tally.n_tokens for tally in tallies)
    cached = min(n_prompt, sum(tally.cached_n for tally in tallies))
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_generated,
        "total_tokens": n_prompt + n_generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def timings_of(tally: Tally) -> dict[str, float]:
    t = tally.timings
    prompt_n, decode_n = int(t.get("prompt_n", 0)), int(t.get("decode_n", 0))
    prompt_ms, decode_ms = t.get("prompt_ms", 0.0), t.get("decode_ms", 0.0)
    return {
        "cache_n": tally.cached_n,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt_n if prompt_n else 0.0,
        "prompt_per_second": t.get("prompt_tokens_per_second", 0.0),
        "predicted_n": tally.n_tokens,
        "predicted_ms": decode_ms,
        "predicted_per_token_ms": decode_ms / decode_n if decode_n else 0.0,
        "predicted_per_second": t.get("decode_tokens_per_second", 0.0),
        **{name: t[name] for name in ("draft_n", "draft_n_accepted") if name in t},
        **{name: value for name, value in t.items() if name.startswith("image_")},
    }


def now() -> int:
    return int(time.time())
