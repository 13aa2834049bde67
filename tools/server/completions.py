"""OpenAI's /v1/completions."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vkbackend.models.engine.completion import Chunk
from vkbackend.models.llm import LLM
from vkbackend.models.pictures import MediaPrompt
from vkbackend.models.sampling.logprobs import Logprobs
from vkbackend.tools.server import streams
from vkbackend.tools.server.body import Fields
from vkbackend.tools.server.front import FINGERPRINT, Json
from vkbackend.tools.server.generations import (
    Job,
    Tally,
    now,
    prompts_of,
    several,
    timings_of,
    token_text,
    usage_of,
)
from vkbackend.tools.server.llama_fields import LlamaFields
from vkbackend.tools.server.llama_results import LlamaResults
from vkbackend.tools.server.service import Service

MAX_LOGPROBS = 20


async def completions(service: Service, request: Request) -> Response:
    fields = await service.fields(request)
    llm = service.ready()
    checked = await CheckedCompletion.of(service, fields, llm)
    # /completions without /v1 is part of llama-server's own API, so its answers have llama-server's fields in
    # addition to OpenAI's.
    checked.is_both = not request.state.is_versioned
    if checked.fields.streams:
        return service.stream(checked.events(request), ping_s=checked.fields.ping_s)
    async with streams.while_connected(request.receive):
        return Json(await checked.whole(request))


class LogprobTable:
    """OpenAI's `logprobs` of a completion, with each token's offset in the text."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._offset = llm, 0

    def of(self, tokens: Sequence[int], rows: Sequence[Logprobs | None]) -> dict[str, Any]:
        texts = [token_text(self._llm, token) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [row and row.logprob for row in rows],
            "top_logprobs": [
                row and {token_text(self._llm, token): p for token, p in row.top} for row in rows
            ],
            "text_offset": offsets,
        }


def joined(tables: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    if not tables:
        return None
    return {name: [item for table in tables for item in table[name]] for name in tables[0]}


class CheckedCompletion:
    def __init__(
        self, service: Service, llm: LLM, jobs: list[Job], n_prompt: int, fields: LlamaFields
    ) -> None:
        self.service, self.llm, self.jobs, self.n_prompt = service, llm, jobs, n_prompt
        self.fields, self.results = fields, LlamaResults(service, llm, fields)
        self.echo = self.wants_logprobs = self.wants_usage = self.is_both = False
        self.head = {
            "id": f"cmpl-{secrets.token_hex(12)}", "object": "text_completion", "created": now(),
            "model": service.config.alias, "system_fingerprint": FINGERPRINT,
        }  # fmt: skip
        self.logprobs = [LogprobTable(llm) for _ in jobs]

    @classmethod
    async def of(cls, service: Service, fields: Fields, llm: LLM) -> CheckedCompletion:
        """Raises InvalidArgument, Refusal."""
        fields.required("prompt")
        fields.refuse("suffix", "", why="use /infill to fill a gap")
        n = service.n_of(fields, "n_cmpl" if fields.has("n_cmpl") else "n", llm)
        fields.refuse("best_of", n, why=f"every answer is returned; omit it, or set it to n ({n})")
        most = service.max_tokens(fields, "max_tokens", "max_completion_tokens", "n_predict")
        llama = LlamaFields(service, fields, llm)
        options = service.sampling(fields, llm) | llama.options
        if (n_top := fields.whole("logprobs", 0, MAX_LOGPROBS, None)) is not None:
            options["logprobs"] = n_top
        if echo := fields.switch("echo"):
            options |= {"echo": True, "prompt_logprobs": n_top}
        stream_options = fields.inner("stream_options")
        prompts, _ = await prompts_of(llm, "prompt", fields.get("prompt"), service.config.limits.prompts // n)
        jobs = [job for ids, text in prompts for job in several(Job(ids, most, options, text), n)]
        for i, job in enumerate(jobs):
            job.index = i
        llama.check_jobs(jobs)
        checked = cls(service, llm, jobs, sum(len(ids) for ids, _ in prompts), llama)
        checked.echo, checked.wants_logprobs = echo, "logprobs" in options
        checked.wants_usage = bool(stream_options and stream_options.switch("include_usage"))
        return checked

    def _table(self, job: Job, chunk: Chunk) -> dict[str, Any] | None:
        """Return OpenAI's `logprobs`, with llama-server's rows of generated tokens as `content`."""
        if chunk.prompt_logprobs is not None:
            ids = () if isinstance(job.ids, MediaPrompt) else job.ids
            return self.logprobs[job.index].of(ids, chunk.prompt_logprobs) | {"content": []}
        if chunk.logprobs is not None and chunk.token is not None:
            row = self.results.row(job, chunk.token, chunk.logprobs)
            return self.logprobs[job.index].of([chunk.token], [chunk.logprobs]) | {"content": [row]}
        return None

    def _text(self, job: Job, chunk: Chunk) -> str:
        """Return a chunk's text. An echoed prompt is the request's text, without special tokens."""
        is_prompt = self.echo and chunk.token is None and not chunk.finish_reason and not chunk.progress
        return job.text if is_prompt and job.text is not None else chunk.text

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        tallies: dict[int, Tally] = {}
        heads = [self._event_head(job.index) for job in self.jobs]
        is_rich, held = self.echo or self.wants_logprobs, b""
        fields, has_more = self.fields, self.is_both or self.fields.is_verbose
        async for job, chunk, tally in fields.chunks(self.service, request, self.llm, self.jobs):
            reason, text, table, extras = chunk.finish_reason, chunk.text, None, {}
            if is_rich:
                text, table = self._text(job, chunk), self._table(job, chunk)
            if has_more or fields.times_tokens or chunk.progress is not None:
                extras = self._extras(job, chunk, tally)
            if reason is None and table is None and not extras:
                if not text:
                    continue
                data = b"%s%s}]}\n\n" % (heads[job.index], streams.encode(text))
            else:
                tallies[job.index] = tally
                choice = {"index": job.index, "logprobs": table, "finish_reason": reason, "text": text}
                timings = {"timings": timings_of(tally)} if reason else {}
                data = streams.event(self.head | {"choices": [choice]} | extras | timings)
            if chunk.token is None and reason is None and chunk.progress is None:
                # Send the prompt with the first token, because an error before the first event sets the
                # status.
                held += data
                continue
            yield held + data
            held = b""
        if self.wants_usage:
            usage = usage_of(list(tallies.values()), self.n_prompt)
            yield streams.event(self.head | {"choices": [], "usage": usage})
        yield streams.DONE

    def _extras(self, job: Job, chunk: Chunk, tally: Tally) -> dict[str, Any]:
        extras = self.results.extras(chunk, tally)
        is_last = tally.finish_reason is not None
        if self.is_both:
            last = self.results.whole(job, tally, "", []) if is_last else {}
            extras |= last | self.results.part(job, chunk, tally) | {"stop": is_last}
            extras.pop("index")
        if is_last:
            return extras | self.results.verbose(job, tally)
        return extras | (
            {"__verbose": self.results.part(job, chunk, tally)} if self.fields.is_verbose else {}
        )

    def _event_head(self, index: int) -> bytes:
        """Return the bytes with which most events begin, up to the text."""
        choice = {"index": index, "logprobs": None, "finish_reason": None, "text": ""}
        return streams.event(self.head | {"choices": [choice]}).removesuffix(b'""}]}\n\n')

    async def whole(self, request: Request) -> dict[str, Any]:
        texts: list[list[str]] = [[] for _ in self.jobs]
        tables: list[list[dict[str, Any]]] = [[] for _ in self.jobs]
        tallies: dict[int, Tally] = {}
        async for job, chunk, tally in self.fields.chunks(self.service, request, self.llm, self.jobs):
            tallies[job.index] = tally
            texts[job.index].append(self._text(job, chunk))
            if (table := self._table(job, chunk)) is not None:
                tables[job.index].append(table)
        choices = [
            {
                "index": i,
                "text": "".join(texts[i]),
                "logprobs": joined(tables[i]),
                "finish_reason": tallies[i].finish_reason,
            }
            for i in range(len(self.jobs))
        ]
        usage = usage_of(list(tallies.values()), self.n_prompt)
        more: dict[str, Any] = self.results.verbose(self.jobs[0], tallies[0])
        if self.is_both and len(self.jobs) == 1:
            more |= self._whole_fields(tallies[0], "".join(texts[0]), tables[0])
        body = self.head | {"choices": choices, "usage": usage, "timings": timings_of(tallies[0])}
        return body | {name: value for name, value in more.items() if name not in body}

    def _whole_fields(self, tally: Tally, text: str, tables: list[dict[str, Any]]) -> dict[str, Any]:
        tokens = tally.tokens if self.fields.returns_tokens else []
        result = self.results.whole(self.jobs[0], tally, text, tokens)
        rows = [row for table in tables for row in table["content"]]
        return result | ({"completion_probabilities": rows} if rows else {})
