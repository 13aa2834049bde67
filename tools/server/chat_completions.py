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
from vkbackend.tools.server.front import FINGERPRINT, Json
from vkbackend.tools.server.generations import Tally, now, timings_of, usage_of
from vkbackend.tools.server.llama_fields import REASONING_FORMATS, LlamaFields
from vkbackend.tools.server.llama_results import LlamaResults
from vkbackend.tools.server.service import Service

MAX_LOGPROBS = 20
MAX_TOOLS = 128
REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("chat_template", (), "the template comes from the model or the command line (--chat-template-file)"),
    ("audio", (), "this server generates text only"),
    ("modalities", (["text"],), "this server generates text only"),
    ("functions", ([],), "deprecated; use `tools`"),
    ("function_call", ("auto", "none"), "deprecated; use `tool_choice`"),
    ("reasoning_control", (False,), "reasoning cannot be stopped by the client"),
)


def chat_options(service: Service, fields: Fields, llm: LLM) -> dict[str, Any]:
    """Return the arguments of `LLM.chat`. Raises InvalidArgument."""
    for name, harmless, why in REFUSED:
        fields.refuse(name, *harmless, why=why)
    options = service.sampling(fields, llm)
    effort = fields.word("reasoning_effort", EFFORTS, None)
    for name in ("reasoning_budget_tokens", "thinking_budget_tokens"):
        if fields.get(name) == 0:
            effort = "none"
        else:
            fields.refuse(name, -1, why="a thought cannot be limited; 0 turns it off")
    variables = template_fields(fields.inner("chat_template_kwargs"), effort)
    options |= template_options(service, variables)
    if fields.has("tools"):
        options["tools"] = fields.items("tools", MAX_TOOLS)
    if fields.has("tool_choice"):
        options["tool_choice"] = fields.get("tool_choice")
    options["parallel_tool_calls"] = fields.switch("parallel_tool_calls", True)
    return options | continuation(fields, service.config.prefills)


def continuation(fields: Fields, prefills: bool) -> dict[str, Any]:
    """Return the options of `LLM.chat` for `continue_final_message` and `add_generation_prompt`. Raises
    InvalidArgument."""
    value, messages = fields.get("continue_final_message"), fields.get("messages")
    opens = fields.switch("add_generation_prompt", True)
    if value not in (None, True, False, "content", "reasoning_content") or isinstance(value, int | float) != (
        isinstance(value, bool)
    ):
        raise refused("continue_final_message", value, "expected true, false, content or reasoning_content")
    last = messages[-1] if isinstance(messages, list) and messages else None
    is_prefix = isinstance(last, Mapping) and last.get("role") == "assistant"
    if not value and prefills and is_prefix:
        before = messages[-2] if len(messages) > 1 else None
        if isinstance(before, Mapping) and before.get("role") == "assistant":
            raise refused(
                "messages", "...", "the list ends with two messages of the assistant; one can be continued"
            )
        value, opens = True, False
    if not value:
        return {} if opens else {"add_generation_prompt": False}
    if opens:
        raise refused(
            "continue_final_message",
            value,
            "it cannot be combined with add_generation_prompt, whose default is true; set one to false",
        )
    if isinstance(last, Mapping) and last.get("tool_calls"):
        raise refused(
            "continue_final_message",
            value,
            "the last message has tool calls, which cannot be continued; add the results as messages",
        )
    if value is True:
        thinks = isinstance(last, Mapping) and last.get("reasoning_content") and not last.get("content")
        value = "reasoning_content" if thinks else "content"
    return {"continue_final_message": value}


def template_options(service: Service, variables: Mapping[str, Any]) -> dict[str, Any]:
    """`variables` of the request override variables from the command line."""
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
        return service.stream(checked.events(request), api, getattr(checked, "ping_s", None))
    async with streams.while_connected(request.receive):
        return Json(await checked.whole(request))


async def rendered_prompt(
    service: Service, request: Request, as_chat: Callable[[Fields], Fields] = lambda fields: fields
) -> ChatRequest:
    chat, llm = as_chat(await service.fields(request)), service.ready()
    messages, options = await messages_of(chat, llm, service.config), chat_options(service, chat, llm)
    return await asyncio.to_thread(lambda: llm.chat_prompt(messages, **options))


async def chat_completions(service: Service, request: Request) -> Response:
    return await respond(service, request, CheckedChat.of)


async def apply_template(service: Service, request: Request) -> Response:
    return Json({"prompt": (await rendered_prompt(service, request)).text})


async def count_input_tokens(service: Service, request: Request) -> Response:
    prompt = await rendered_prompt(service, request)
    return Json({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


class CheckedChat:
    def __init__(self, service: Service, llm: LLM, jobs: list[ChatJob], fields: LlamaFields) -> None:
        self.service, self.llm, self.jobs = service, llm, jobs
        self.fields, self.results = fields, LlamaResults(service, llm, fields)
        self.ping_s = fields.ping_s
        self.n_prompt = len(jobs[0].ids)
        self.wants_usage = self.is_raw = False
        self.id = f"chatcmpl-{secrets.token_hex(12)}"
        self.created = now()

    @classmethod
    async def of(cls, service: Service, fields: Fields, llm: LLM) -> CheckedChat:
        messages, options = await messages_of(fields, llm, service.config), chat_options(service, fields, llm)
        llama = LlamaFields(service, fields, llm)
        options |= llama.options
        if fields.switch("logprobs"):
            options["logprobs"] = fields.whole("top_logprobs", 0, MAX_LOGPROBS, 0)
        elif fields.get("top_logprobs"):
            raise refused("top_logprobs", fields.get("top_logprobs"), "requires `logprobs`: true")
        n = service.n_of(fields, "n_cmpl" if fields.has("n_cmpl") else "n", llm)
        most = service.max_tokens(fields, "max_completion_tokens", "max_tokens", "n_predict")
        form = fields.word("reasoning_format", REASONING_FORMATS, service.config.reasoning_format)
        usage = fields.inner("stream_options")
        checked = cls(
            service, llm, await chat_jobs(service.admission, llm, messages, most, n, options), llama
        )
        llama.check_jobs(checked.jobs)
        checked.is_raw = form == "none" and not fields.get("tools")
        checked.wants_usage = bool(usage and usage.switch("include_usage"))
        return checked

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.service.config.alias,
            "system_fingerprint": FINGERPRINT,
        }  # fmt: skip

    def _logprobs(self, job: ChatJob, chunk: ChatChunk) -> list[dict[str, Any]]:
        raw = chunk.chunk
        if raw.logprobs is None or raw.token is None:
            return []
        return [self.results.row(job, raw.token, raw.logprobs)]

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
        async for job, chunk, tally in self.fields.chunks(self.service, request, self.llm, self.jobs):
            assert isinstance(chunk, ChatChunk)
            tallies[job.index] = tally
            extras = self.results.extras(chunk.chunk, tally) if self._has_extras else {}
            if job.index not in begun or chunk.chunk.progress is not None:
                # llama-server's first delta has no content. Each event of prompt progress repeats this delta.
                begun.add(job.index)
                first = {"role": "assistant", "content": None}
                progress = extras if chunk.chunk.progress is not None else {}
                yield streams.event(head | {"choices": [_choice(job.index, first, None, None)]} | progress)
                if progress:
                    continue
            delta, rows = self._delta(chunk), self._logprobs(job, chunk)
            logprobs = {"content": rows, "refusal": None} if rows else None
            if not rows and not extras and delta.keys() == {"content"}:
                yield b"%s%s}}]}\n\n" % (plain[job.index], streams.encode(delta["content"]))
            elif delta or rows:
                yield streams.event(head | {"choices": [_choice(job.index, delta, None, logprobs)]} | extras)
            if chunk.finish_reason:
                last = {"choices": [_choice(job.index, {}, chunk.finish_reason, None)]}
                more = {"timings": timings_of(tally)} | self.results.verbose(job, tally)
                yield streams.event(head | last | more)
        if self.wants_usage:
            usage = usage_of(list(tallies.values()), self.n_prompt)
            timings = timings_of(tallies[0])  # llama-server's last event has timings
            yield streams.event(head | {"choices": [], "usage": usage, "timings": timings})
        yield streams.DONE

    @property
    def _has_extras(self) -> bool:
        return self.fields.times_tokens or self.fields.shows_progress

    def _plain_head(self, head: dict[str, Any], index: int) -> bytes:
        """Return the bytes with which most events begin, up to the text."""
        choice = {"index": index, "finish_reason": None, "logprobs": None, "delta": {"content": ""}}
        return streams.event(head | {"choices": [choice]}).removesuffix(b'""}}]}\n\n')

    async def whole(self, request: Request) -> dict[str, Any]:
        chunks: list[list[ChatChunk]] = [[] for _ in self.jobs]
        tallies: dict[int, Tally] = {}
        async for job, chunk, tally in self.fields.chunks(self.service, request, self.llm, self.jobs):
            assert isinstance(chunk, ChatChunk)
            chunks[job.index].append(chunk)
            tallies[job.index] = tally
        choices = []
        for job, parts in zip(self.jobs, chunks, strict=True):
            message = self._message(job, parts)
            rows = [row for part in parts for row in self._logprobs(job, part)]
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
        more = {"timings": timings_of(tallies[0])} | self.results.verbose(self.jobs[0], tallies[0])
        return head | {"choices": choices, "usage": usage} | more

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
