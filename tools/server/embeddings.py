"""OpenAI's /v1/embeddings, llama-server's /embedding and /embeddings, and reranking in the formats of Jina,
Cohere and Text Embeddings Inference (TEI)."""

from __future__ import annotations

import asyncio
import base64
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from vkbackend.checks import refused
from vkbackend.errors import InvalidArgument
from vkbackend.models.embeddings.methods import Job
from vkbackend.models.embeddings.pooling import MAX_NORM
from vkbackend.models.llm import LLM
from vkbackend.tools.server import streams
from vkbackend.tools.server.body import Fields
from vkbackend.tools.server.failures import Refusal
from vkbackend.tools.server.front import Json
from vkbackend.tools.server.service import Service

MAX_INPUTS, MAX_DOCUMENTS = 2048, 1000
T = TypeVar("T")


async def embeddings(service: Service, request: Request) -> Response:
    """Answer as OpenAI under /v1, and as llama-server without it."""
    if not request.state.is_versioned:
        return await embedding(service, request)
    fields, llm = await service.fields(request), service.ready()
    fields.required("input")
    if service.config.pooling == "none":
        raise Refusal(400, "pooling none has no single embedding; use /embeddings, or another --pooling")
    as_base64 = fields.word("encoding_format", ("float", "base64"), "float") == "base64"
    job = await _embed_job(service, fields, llm, "input")
    vectors = await _computed(service, request, llm, job)
    data = [
        {"object": "embedding", "index": i, "embedding": _base64(row) if as_base64 else row.tolist()}
        for i, row in enumerate(np.atleast_2d(vectors))
    ]
    head = {"object": "list", "data": data, "model": service.config.alias}
    return Json(head | {"usage": _usage(job)})


async def embedding(service: Service, request: Request) -> Response:
    """Answer with a list of vectors per text: one vector, or with pooling none a vector per token."""
    fields, llm = await service.fields(request), service.ready()
    name = "content" if fields.has("content") else "input"
    fields.required(name)
    job = await _embed_job(service, fields, llm, name)
    vectors = await _computed(service, request, llm, job)
    rows = vectors if isinstance(vectors, list) or len(job.texts) > 1 else [vectors]
    return Json([{"index": i, "embedding": np.atleast_2d(row).tolist()} for i, row in enumerate(rows)])


async def _embed_job(service: Service, fields: Fields, llm: LLM, name: str) -> Job[Any]:
    if service.config.reranks_only:
        raise Refusal(501, "the server only reranks (--reranking); start it without this flag")
    given = fields.get(name)
    if isinstance(given, list) and len(given) > max(MAX_INPUTS, llm.n_text):
        raise InvalidArgument(
            f"{name} has {len(given)} entries, at most {MAX_INPUTS} texts are allowed", argument=name
        )
    if not isinstance(given, str | list):
        raise refused(name, given, "expected a text, token ids, or a list of these")
    if isinstance(given, list) and len(given) > MAX_INPUTS and not isinstance(given[0], int):
        raise InvalidArgument(
            f"{name} has {len(given)} texts, at most {MAX_INPUTS} are allowed", argument=name
        )
    pooling = service.config.pooling
    kind = llm.heads.pooling if pooling is None else pooling
    default = -1 if kind in ("none", "rank") else service.config.embd_normalize
    norm = fields.whole("embd_normalize", -1, MAX_NORM, default)
    most = fields.whole("dimensions", 1, llm.heads.n_embd, None)
    cut = fields.switch("truncate")
    return await asyncio.to_thread(llm.embed_job, given, pooling, norm, most, cut, name=name)


async def rerank(service: Service, request: Request) -> Response:
    fields, llm = await service.fields(request), service.ready()
    if service.config.embeds_only:
        raise Refusal(501, "the server only embeds (--embedding); start it without this flag")
    is_tei = fields.has("texts") and not fields.has("documents")
    name = "texts" if is_tei else "documents"
    fields.required("query")
    fields.required(name)
    texts = [_text_of(f"{name}[{i}]", given) for i, given in enumerate(fields.items(name, MAX_DOCUMENTS))]
    query = fields.text("query", "")
    top_n = fields.whole("top_n", 1, 1 << 31, None)
    raw, cut = fields.switch("raw_scores"), fields.switch("truncate")
    shows = fields.switch("return_text" if is_tei else "return_documents")
    job = await asyncio.to_thread(llm.rerank_job, query, texts, top_n, raw, cut)
    ranked = await _computed(service, request, llm, job)
    if is_tei:
        return Json(
            [{"index": i, "score": score} | ({"text": texts[i]} if shows else {}) for i, score in ranked]
        )
    results = [
        {"index": i, "relevance_score": score} | ({"document": {"text": texts[i]}} if shows else {})
        for i, score in ranked
    ]
    head = {"model": service.config.alias, "object": "list", "usage": _usage(job)}
    return Json(head | {"results": results})


def _text_of(name: str, given: Any) -> str:
    text = given.get("text") if isinstance(given, dict) else given
    if not isinstance(text, str):
        raise refused(name, given, 'expected a text, or an object {"text": ...}')
    return text


async def _computed(service: Service, request: Request, llm: LLM, job: Job[T]) -> T:
    """Compute the job, and cancel it if the client disconnects. Raises Refusal (429) and the engine's
    errors."""
    # The engine gets only a few of a request's texts at a time, so the request counts as one sequence.
    with service.admission.enter(1, streams=False):
        request.state.tokens = job.n_tokens, 0
        async with streams.while_connected(request.receive):
            result = await service.retried(llm, lambda llm: llm.arun(job))
    service.metrics.prompt_tokens += job.n_tokens
    return result


def _base64(row: np.ndarray) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()


def _usage(job: Job[Any]) -> dict[str, int]:
    return {"prompt_tokens": job.n_tokens, "total_tokens": job.n_tokens}
