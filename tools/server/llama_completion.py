"""llama-server's /completion and /infill. Unsupported fields are refused by name (docs/serving.md)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vkbackend.models.engine.completion import Chunk
from vkbackend.models.engine.messages import check_tokens
from vkbackend.models.llm import LLM
from vkbackend.models.sampling.logprobs import Logprobs
from vkbackend.models.text.infill import infill_prompt
from vkbackend.tools.server import streams
from vkbackend.tools.server.body import Fields
from vkbackend.tools.server.generations import Job, Tally, prompts_of, several, stop_met, timings_of
from vkbackend.tools.server.service import Json, Service

MAX_PROBS = 100
MAX_MS = 1 << 31
MAX_EXTRA = 256  # files in `input_extra`
MAX_RESPONSE_FIELDS = 64
# (field, harmless values, why other values are refused)
REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("n_indent", (0,), "a minimum indentation is not supported"),
    ("n_keep", (0, -1), "a full context ends the text, it is not shifted; omit this field"),
    ("n_discard", (0,), "a full context ends the text, it is not shifted; omit this field"),
    ("n_cache_reuse", (0,), "only prefixes are reused, not chunks from the middle of a prompt"),
    ("cache_prompt", (True,), "the prefix cache is set when the server starts (--no-prefix-cache)"),
    ("min_keep", (0,), "samplers keep at least one token; other minimums are not supported"),
    ("post_sampling_probs", (False,), "only the model's probabilities, before samplers, are reported"),
    ("return_progress", (False,), "prompt progress is not reported"),
    ("lora", ([],), "adapters are not supported; merge the adapter into the model"),
    ("adaptive_target", (-1, -1.0), "this sampler is not supported"),
)  # fmt: skip


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
    """Fill the gap between `input_prefix` and `input_suffix`. The text in the gap begins with `prompt`."""
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
        return service.stream(checked.events(request))
    async with streams.while_connected(request.receive):
        results = await checked.whole(request)
    return Json(results if is_list else results[0])


class LlamaCompletion:
    """A checked request. Raises InvalidArgument."""

    def __init__(self, service: Service, fields: Fields, llm: LLM) -> None:
        for name, harmless, why in REFUSED:
            fields.refuse(name, *harmless, why=why)
        self.service, self.llm = service, llm
        self.most = service.max_tokens(fields, "n_predict", "max_tokens")
        self.options = service.sampling(fields, llm)
        if n_probs := fields.whole("n_probs", 0, MAX_PROBS, 0):
            self.options["logprobs"] = n_probs
        self.slot = fields.whole("id_slot", -1, llm.n_slots - 1, -1)
        if self.slot >= 0:
            self.options["slot"] = self.slot
        self.returns_tokens = fields.switch("return_tokens")
        self.times_tokens = fields.switch("timings_per_token")
        self.limit_ms = fields.whole("t_max_predict_ms", 0, MAX_MS, 0)
        self.response_fields = fields.items("response_fields", MAX_RESPONSE_FIELDS)
        self.jobs: list[Job] = []

    def take(self, jobs: Sequence[Job]) -> None:
        self.jobs = list(jobs)
        for i, job in enumerate(self.jobs):
            job.index = i
        if len(self.jobs) > 1:
            for name, value in (("id_slot", self.slot >= 0), ("t_max_predict_ms", self.limit_ms)):
                Fields({name: 1 if value else None}).refuse(name, why="it is limited to a single sequence")

    # ---- results ----

    async def _chunks(
        self, request: Request, *, streamed: bool
    ) -> AsyncGenerator[tuple[Job, Chunk, Tally], None]:
        """Yield the chunks of `Service.generate`. After `t_max_predict_ms`, end a sequence with a line
        break."""
        began = None
        source = self.service.generate(request, self.llm, self.jobs, streamed=streamed)
        async with aclosing(source):
            async for job, chunk, tally in source:
                tally.text.append(chunk.text)
                began = began or time.monotonic()
                late = self.limit_ms and 1e3 * (time.monotonic() - began) > self.limit_ms
                if late and not chunk.finish_reason and "\n" in "".join(tally.text):
                    tally.finish_reason = "length"
                yield job, chunk, tally
                if late and tally.finish_reason:
                    return

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        async for job, chunk, tally in self._chunks(request, streamed=True):
            part: dict[str, Any] = {
                "index": job.index,
                "content": chunk.text,
                "tokens": [] if chunk.token is None else [chunk.token],
                "stop": False,
                "id_slot": chunk.slot,
                "tokens_predicted": tally.n_tokens,
                "tokens_evaluated": tally.prompt_n,
            }
            if chunk.logprobs and chunk.token is not None:
                part["completion_probabilities"] = [self._row(chunk.token, chunk.logprobs)]
            if self.times_tokens:
                part["timings"] = timings_of(tally)
            if tally.finish_reason is None:
                yield streams.event(part)
                continue
            yield streams.event(self._fitted(self._result(job, tally) | part | {"stop": True}))

    async def whole(self, request: Request) -> list[dict[str, Any]]:
        tallies: dict[int, Tally] = {}
        rows: list[list[dict[str, Any]]] = [[] for _ in self.jobs]
        async for job, chunk, tally in self._chunks(request, streamed=False):
            tallies[job.index] = tally
            if chunk.logprobs and chunk.token is not None:
                rows[job.index].append(self._row(chunk.token, chunk.logprobs))
        results = []
        for job in self.jobs:
            tally = tallies[job.index]
            result = self._result(job, tally) | {
                "content": "".join(tally.text),
                "tokens": tally.tokens if self.returns_tokens else [],
            }
            if rows[job.index]:
                result["completion_probabilities"] = rows[job.index]
            results.append(self._fitted(result))
        return results

    def _result(self, job: Job, tally: Tally) -> dict[str, Any]:
        kind, word = self._end(job, tally)
        prompt = job.text if job.text is not None else self.llm.detokenize(job.ids, skip_special=False)
        return {
            "index": job.index,
            "content": "",
            "tokens": [],
            "id_slot": tally.slot,
            "stop": True,
            "model": self.service.config.alias,
            "tokens_predicted": tally.n_tokens,
            "tokens_evaluated": tally.prompt_n,
            "generation_settings": self._settings(job),
            "prompt": prompt,
            "has_new_line": "\n" in "".join(tally.text),
            "truncated": kind == "limit" and self._is_full(job, tally),
            "stop_type": kind,
            "stopping_word": word,
            "tokens_cached": tally.cached_n,
            "timings": timings_of(tally),
        }

    def _is_full(self, job: Job, tally: Tally) -> bool:
        return tally.n_tokens != job.max_tokens and tally.prompt_n + tally.n_tokens >= self.llm.n_ctx

    def _settings(self, job: Job) -> dict[str, Any]:
        options = {name: value for name, value in job.options.items() if name != "logit_bias"}
        return options | {
            "n_predict": -1 if job.max_tokens is None else job.max_tokens,
            "n_ctx": self.llm.n_ctx,
            "seed": options.get("seed", -1),
            "logit_bias": [
                [token, bias] for token, bias in job.options.get("logit_bias", ()) if bias > -1e30
            ],
        }

    def _end(self, job: Job, tally: Tally) -> tuple[str, str]:
        if tally.finish_reason == "length":
            return "limit", ""
        word = stop_met(self.llm, tally, "".join(tally.text), job.options.get("stop", ()))
        return ("word", word) if word else ("eos", "")

    def _row(self, token: int, row: Logprobs) -> dict[str, Any]:
        return self._prob(token, row.logprob) | {"top_logprobs": [self._prob(t, p) for t, p in row.top]}

    def _prob(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.llm.tokenizer.piece(token)
        text = piece.decode("utf-8", "replace")
        return {"id": token, "token": text, "bytes": list(piece), "logprob": logprob}

    def _fitted(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return only the requested fields. A path "a/b" becomes field b of the result."""
        if not self.response_fields:
            return result
        fitted: dict[str, Any] = {}
        for path in self.response_fields:
            value: Any = result
            *_, name = parts = str(path).split("/")
            for part in parts:
                value = value.get(part, KeyError) if isinstance(value, Mapping) else KeyError
            if value is not KeyError:
                fitted[name] = value
        return fitted
