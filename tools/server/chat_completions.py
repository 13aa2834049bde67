"""OpenAI's /v1/chat/completions, and llama-server's /apply-template."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from vkbackend.checks import refused
from vkbackend.models.chats.answer import ChatChunk
from vkbackend.models.chats.request import ChatRequest
from vkbackend.models.llm import LLM
from vkbackend.tools.server import streams
from vkbackend.tools.server.body import Fields
from vkbackend.tools.server.chats import EFFORTS, ChatJob, chat_jobs, messages_of, template_fields
from vkbackend.tools.server.failures import OPENAI, Api
from vkbackend.tools.server.generations import Tally, now, timings_of, usage_of
from vkbackend.tools.server.service import Json, Service

MAX_LOGPROBS = 20
MAX_TOOLS = 128
REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("chat_template", (), "the template comes from the model or the command line (--chat-template-file)"),
    ("audio", (), "this server generates text only"),
    ("modalities", (["text"],), "this server generates text only"),
    ("functions", ([],), "deprecated; use `tools`"),
    ("function_call", ("auto", "none"), "deprecated; use `tool_choice`"),
    ("reasoning_control", (False,), "reasoning cannot be stopped by the client"),
    ("cache_prompt", (True,), "the prefix cache is set when the server starts (--no-prefix-cache)"),
    ("lora", ([],), "adapters are not supported; merge the adapter into the model"),
)


def chat_options(service: Service, fields: Fields, llm: LLM) -> dict[str, Any]:
    """Return the arguments of `LLM.chat`. Raises InvalidArgument."""
    for name, harmless, why in REFUSED:
        fields.refuse(name, *harmless, why=why)
    options = service.sampling(fields, llm)
    effort = fields.word("reasoning_effort", EFFORTS, None)
    variables = template_fields(fields.inner("chat_template_kwargs"), effort)
    options |= template_options(service, variables)
    if fields.has("tools"):
        options["tools"] = fields.items("tools", MAX_TOOLS)
    if fields.has("tool_choice"):
        options["tool_choice"] = fields.get("tool_choice")
    options["parallel_tool_calls"] = fields.switch("parallel_tool_calls", True)
    return options


def template_options(service: Service, variables: Mapping[str, Any]) -> dict[str, Any]:
    """`variables` of the request override the command line's."""
    options: dict[str, Any] = {"template_variables": dict(service.config.template_fields) | dict(variables)}
    return options if service.config.template is None else options | {"template": service.config.template}


class CheckedRequest(Protocol):
    def events(self, request: Request) -> AsyncGenerator[bytes, None]: ...

    async def whole(self, request: Request) -> dict[str, Any]: ...


async def respond(
    service: Service,
    request: Request,
    of: Callable[[Service, Fields, LLM], Awaitable[CheckedRequest]],
    api: Api = OPENAI,
) -> Response:
    fields = await service.fields(request)
    checked = await of(service, fields, service.ready())
    if fields.switch("stream"):
        return service.stream(checked.events(request), api)
    async with streams.while_connected(request.receive):
        return Json(await checked.whole(request))


async def rendered_prompt(
    service: Service, request: Request, as_chat: Callable[[Fields], Fields] = lambda fields: fields
) -> ChatRequest:
    """Wait for the template's process in a thread."""
    chat, llm = as_chat(await service.fields(request)), service.ready()
    messages, options = messages_of(chat, llm), chat_options(service, chat, llm)
    return await asyncio.to_thread(lambda: llm.chat_prompt(messages, **options))


async def chat_completions(service: Service, request: Request) -> Response:
    return await respond(service, request, CheckedChat.of)


async def apply_template(service: Service, request: Request) -> Response:
    return Json({"prompt": (await rendered_prompt(service, request)).text})


async def count_input_tokens(service: Service, request: Request) -> Response:
    """Answer llama-server's /v1/chat/completions/input_tokens."""
    prompt = await rendered_prompt(service, request)
    return Json({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


class CheckedChat:
    def __init__(self, service: Service, llm: LLM, jobs: list[ChatJob]) -> None:
        self.service, self.llm, self.jobs = service, llm, jobs
        self.n_prompt = len(jobs[0].ids)
        self.wants_usage = self.is_raw = False
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self.created = now()

    @classmethod
    async def of(cls, service: Service, fields: Fields, llm: LLM) -> CheckedChat:
        messages, options = messages_of(fields, llm), chat_options(service, fields, llm)
        if fields.switch("logprobs"):
            options["logprobs"] = fields.whole("top_logprobs", 0, MAX_LOGPROBS, 0)
        elif fields.get("top_logprobs"):
            raise refused("top_logprobs", fields.get("top_logprobs"), "requires `logprobs`: true")
        n = service.n_of(fields, "n", llm)
        most = service.max_tokens(fields, "max_completion_tokens", "max_tokens", "n_predict")
        form = fields.word("reasoning_format", ("none", "auto", "deepseek"), service.config.reasoning_format)
        usage = fields.inner("stream_options")
        checked = cls(service, llm, await chat_jobs(llm, messages, most, n, options))
        checked.is_raw = form == "none" and not fields.get("tools")
        checked.wants_usage = bool(usage and usage.switch("include_usage"))
        return checked

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.service.config.alias}

    def _logprobs(self, chunk: ChatChunk) -> list[dict[str, Any]]:
        raw = chunk.chunk
        if raw.logprobs is None or raw.token is None:
            return []
        top = [self._logprob(token, value) for token, value in raw.logprobs.top]
        return [self._logprob(raw.token, raw.logprobs.logprob) | {"top_logprobs": top}]

    def _logprob(self, token: int, value: float) -> dict[str, Any]:
        piece = self.llm.tokenizer.piece(token)
        return {"token": piece.decode("utf-8", "replace"), "bytes": list(piece), "logprob": value}

    def _delta(self, chunk: ChatChunk) -> dict[str, Any]:
        if self.is_raw:
            return {"content": chunk.chunk.text} if chunk.chunk.text else {}
        delta: dict[str, Any] = {}
        if chunk.reasoning:
            delta["reasoning_content"] = chunk.reasoning
        if chunk.content:
            delta["content"] = chunk.content
        if chunk.tool_calls:
            delta["tool_calls"] = [_call_delta(call) for call in chunk.tool_calls]
        return delta

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        tallies: dict[int, Tally] = {}
        head = self._head("chat.completion.chunk")
        begun: set[int] = set()
        plain = [self._plain_head(head, job.index) for job in self.jobs]
        async for job, chunk, tally in self.service.generate(request, self.llm, self.jobs, streamed=True):
            assert isinstance(chunk, ChatChunk)
            tallies[job.index] = tally
            if job.index not in begun:
                begun.add(job.index)
                first = {"role": "assistant", "content": ""}
                yield streams.event(head | {"choices": [_choice(job.index, first, None, None)]})
            delta, rows = self._delta(chunk), self._logprobs(chunk)
            logprobs = {"content": rows, "refusal": None} if rows else None
            if not rows and delta.keys() == {"content"}:
                yield b"%s%s}}]}\n\n" % (plain[job.index], streams.encode(delta["content"]))
            elif delta or rows:
                yield streams.event(head | {"choices": [_choice(job.index, delta, None, logprobs)]})
            if chunk.finish_reason:
                last = {"choices": [_choice(job.index, {}, chunk.finish_reason, None)]}
                yield streams.event(head | last | {"timings": timings_of(tally)})
        if self.wants_usage:
            usage = usage_of(list(tallies.values()), self.n_prompt)
            yield streams.event(head | {"choices": [], "usage": usage})
        yield streams.DONE

    def _plain_head(self, head: dict[str, Any], index: int) -> bytes:
        """Return the bytes before an event's text, which most events share."""
        choice = {"index": index, "finish_reason": None, "logprobs": None, "delta": {"content": ""}}
        return streams.event(head | {"choices": [choice]}).removesuffix(b'""}}]}\n\n')

    async def whole(self, request: Request) -> dict[str, Any]:
        chunks: list[list[ChatChunk]] = [[] for _ in self.jobs]
        tallies: dict[int, Tally] = {}
        async for job, chunk, tally in self.service.generate(request, self.llm, self.jobs, streamed=False):
            assert isinstance(chunk, ChatChunk)
            chunks[job.index].append(chunk)
            tallies[job.index] = tally
        choices = []
        for job, parts in zip(self.jobs, chunks, strict=True):
            message, rows = self._message(job, parts), [row for part in parts for row in self._logprobs(part)]
            choices.append(
                {
                    "index": job.index,
                    "message": message,
                    "logprobs": {"content": rows, "refusal": None} if rows else None,
                    "finish_reason": parts[-1].finish_reason,
                }
            )
        usage = usage_of(list(tallies.values()), self.n_prompt)
        head = self._head("chat.completion")
        return head | {"choices": choices, "usage": usage, "timings": timings_of(tallies[0])}

    def _message(self, job: ChatJob, parts: list[ChatChunk]) -> dict[str, Any]:
        if self.is_raw:
            return {"role": "assistant", "content": "".join(part.chunk.text for part in parts)}
        assert job.prepared is not None
        return job.prepared.whole(parts).message


def _call_delta(call: Any) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _choice(index: int, delta: dict[str, Any], reason: str | None, logprobs: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
