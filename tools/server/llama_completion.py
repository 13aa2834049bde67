"""llama-server's /completion and /infill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vkbackend.models.engine.messages import check_tokens
from vkbackend.models.llm import LLM
from vkbackend.models.text.infill import infill_prompt
from vkbackend.tools.server import streams
from vkbackend.tools.server.body import Fields
from vkbackend.tools.server.front import Json
from vkbackend.tools.server.generations import Job, Tally, prompts_of, several
from vkbackend.tools.server.llama_fields import MAX_PROBS, LlamaFields
from vkbackend.tools.server.llama_results import LlamaResults
from vkbackend.tools.server.service import Service

MAX_EXTRA = 256  # files in `input_extra`


async def completion(service: Service, request: Request) -> Response:
    fields = await service.fields(request)
    llm = service.ready()
    fields.required("prompt")
    n = service.n_of(fields, "n_cmpl" if fields.has("n_cmpl") else "n", llm)
    checked = LlamaCompletion(service, fields, llm)
    prompts, is_list = await prompts_of(
        llm, "prompt", fields.get("prompt"), service.config.limits.prompts // n
    )
    checked.take(
        [job for ids, text in prompts for job in several(Job(ids, checked.most, checked.options, text), n)]
    )
    return await answer(service, request, fields, checked, is_list or n > 1)


async def infill(service: Service, request: Request) -> Response:
    """Generate the text between `input_prefix` and `input_suffix`. The text begins with `prompt`."""
    fields = await service.fields(request)
    llm = service.ready()
    fields.required("input_prefix")
    fields.required("input_suffix")
    before, after = fields.text("input_prefix", ""), fields.text("input_suffix", "")
    files = {}
    for i, file in enumerate(fields.objects("input_extra", MAX_EXTRA)):
        file.required("text")
        files[file.text("filename", "") or f"file {i + 1}"] = file.text("text", "")
    begun = fields.text("prompt", "")
    n = service.n_of(fields, "n_cmpl" if fields.has("n_cmpl") else "n", llm)
    checked = LlamaCompletion(service, fields, llm)

    def encode() -> list[int]:
        ids = infill_prompt(llm.tokenizer, before, after, files=files)
        return ids + (llm.tokenize(begun, add_special=False) if begun else [])

    ids = await asyncio.to_thread(encode)
    check_tokens(ids, llm.n_vocab, llm.n_ctx)
    checked.take(several(Job(ids, checked.most, checked.options), n))
    return await answer(service, request, fields, checked, n > 1)


async def answer(
    service: Service, request: Request, fields: Fields, checked: LlamaCompletion, is_list: bool
) -> Response:
    if fields.switch("stream"):
        return service.stream(checked.events(request), ping_s=checked.fields.ping_s)
    async with streams.while_connected(request.receive):
        results = await checked.whole(request)
    return Json(results if is_list else results[0])


class LlamaCompletion:
    """A checked request. Raises InvalidArgument."""

    def __init__(self, service: Service, fields: Fields, llm: LLM) -> None:
        self.service, self.llm = service, llm
        self.fields = LlamaFields(service, fields, llm)
        self.results = LlamaResults(service, llm, self.fields)
        self.most = service.max_tokens(fields, "n_predict", "max_completion_tokens", "max_tokens")
        self.options = service.sampling(fields, llm) | self.fields.options
        if not self.fields.n_probs and (n := fields.whole("logprobs", 0, MAX_PROBS, 0)):
            self.options["logprobs"] = n
        self.jobs: list[Job] = []

    def take(self, jobs: Sequence[Job]) -> None:
        self.jobs = list(jobs)
        for i, job in enumerate(self.jobs):
            job.index = i
        self.fields.check_jobs(self.jobs)

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        """llama-server's last event repeats no text."""
        async for job, chunk, tally in self.fields.chunks(self.service, request, self.llm, self.jobs):
            part = self.results.part(job, chunk, tally)
            if tally.finish_reason is None:
                yield streams.event(part)
                continue
            if chunk.text or chunk.token is not None:
                yield streams.event(part)
            yield streams.event(self.results.fitted(self.results.whole(job, tally, "", [])))

    async def whole(self, request: Request) -> list[dict[str, Any]]:
        tallies: dict[int, Tally] = {}
        rows: list[list[dict[str, Any]]] = [[] for _ in self.jobs]
        async for job, chunk, tally in self.fields.chunks(self.service, request, self.llm, self.jobs):
            tallies[job.index] = tally
            if chunk.logprobs and chunk.token is not None:
                rows[job.index].append(self.results.row(job, chunk.token, chunk.logprobs))
        results = []
        for job in self.jobs:
            tally = tallies[job.index]
            tokens = tally.tokens if self.fields.returns_tokens else []
            result = self.results.whole(job, tally, "".join(tally.text), tokens)
            if rows[job.index]:
                result["completion_probabilities"] = rows[job.index]
            results.append(self.results.fitted(result))
        return results
