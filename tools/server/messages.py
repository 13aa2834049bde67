"""Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vkbackend.checks import refused
from vkbackend.errors import InvalidArgument
from vkbackend.models.llm import LLM
from vkbackend.tools.server import streams
from vkbackend.tools.server.body import Fields
from vkbackend.tools.server.chat_completions import MAX_TOOLS, chat_options, rendered_prompt, respond
from vkbackend.tools.server.chats import MAX_MESSAGES, Block, Blocks, ChatJob, chat_jobs, messages_of
from vkbackend.tools.server.failures import ANTHROPIC
from vkbackend.tools.server.front import Json
from vkbackend.tools.server.generations import Tally, stop_met
from vkbackend.tools.server.images import merged, of_anthropic
from vkbackend.tools.server.service import Service

MAX_BLOCKS = 10_000
# Claude Code's system prompt begins with this block. The block is removed, because it changes, and changes
# would defeat the prefix cache.
BILLING = "x-anthropic-billing-header:"
CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": "tool"}


async def messages(service: Service, request: Request) -> Response:
    return await respond(service, request, CheckedMessage.of, ANTHROPIC)


async def count_tokens(service: Service, request: Request) -> Response:
    prompt = await rendered_prompt(service, request, as_chat)
    return Json({"input_tokens": len(prompt.ids)})


# ---- requests, as chat completions ----


def as_chat(fields: Fields) -> Fields:
    """Raises InvalidArgument."""
    kept: dict[str, Any] = {
        name: fields.get(name)
        for name in ("temperature", "top_p", "top_k", "seed", "chat_template_kwargs", "model", "lora")
    }
    messages: list[dict[str, Any]] = []
    system = [text for text in _texts(fields, "system") if not text.startswith(BILLING)]
    if system:
        messages.append({"role": "system", "content": "\n\n".join(system)})
    fields.required("messages")
    for message in fields.objects("messages", MAX_MESSAGES):
        message.required("role")
        role = message.word("role", ("user", "assistant", "system"), "user")
        message.required("content")
        messages += _assistant(message) if role == "assistant" else _user(message, role)
    kept |= {"messages": messages, "stop": fields.get("stop_sequences")}
    if fields.has("tools"):
        kept["tools"] = [_tool(tool) for tool in fields.objects("tools", MAX_TOOLS)]
    if (choice := fields.inner("tool_choice")) is not None:
        choice.required("type")
        kept["tool_choice"] = CHOICES[choice.word("type", tuple(CHOICES), "auto")]
        if kept["tool_choice"] == "tool":
            kept["tool_choice"] = {"type": "function", "function": {"name": choice.text("name", "")}}
        kept["parallel_tool_calls"] = not choice.switch("disable_parallel_tool_use")
    if (thinking := fields.inner("thinking")) is not None:
        kind = thinking.word("type", ("enabled", "disabled", "adaptive"), "enabled")
        kwargs = fields.inner("chat_template_kwargs")
        kept["chat_template_kwargs"] = {"enable_thinking": kind != "disabled"} | (
            kwargs.values if kwargs else {}
        )
    return Fields(kept)


def _texts(fields: Fields, name: str) -> list[str]:
    """Return the texts of a field. Raises InvalidArgument for other blocks."""
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return [value] if value else []
    return [_text(block) for block in fields.objects(name, MAX_BLOCKS)]


def _parts(fields: Fields, name: str) -> list[str | dict[str, Any]]:
    """Return the texts and images of a field. Raises InvalidArgument for other blocks."""
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return [value] if value else []
    return [_part(block) for block in fields.objects(name, MAX_BLOCKS)]


def _part(block: Fields) -> str | dict[str, Any]:
    return of_anthropic(block) if block.get("type") == "image" else _text(block)


def _text(block: Fields) -> str:
    if block.get("type") != "text":
        raise InvalidArgument(
            f"{block.name('type')}={block.get('type')!r:.60}: this block is not supported here",
            argument=block.name("type"),
        )
    return block.text("text", "")


def _blocks(message: Fields) -> list[Fields]:
    content = message.get("content")
    if isinstance(content, str):
        return [Fields({"type": "text", "text": content}, f"{message.name('content')}.")]
    return message.objects("content", MAX_BLOCKS)


def _user(message: Fields, role: str) -> list[dict[str, Any]]:
    results, texts = list[dict[str, Any]](), list[str | dict[str, Any]]()
    for block in _blocks(message):
        if block.get("type") == "tool_result":
            parts = _parts(block, "content")
            if block.switch("is_error"):
                first = parts.pop(0) if parts and isinstance(parts[0], str) else ""
                parts = [f"Error: {first}", *parts]
            result = {"role": "tool", "tool_call_id": block.text("tool_use_id", "")}
            results.append(result | {"content": merged(parts, "\n")})
        else:
            texts.append(_part(block))
    return results + ([{"role": role, "content": merged(texts, "\n\n")}] if texts or not results else [])


def _assistant(message: Fields) -> list[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for block in _blocks(message):
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(block.text("thinking", ""))
        elif kind == "redacted_thinking":
            continue  # another server encrypted it
        elif kind == "tool_use":
            given = block.inner("input")
            arguments = json.dumps(given.values if given else {}, ensure_ascii=False)
            function = {"name": block.text("name", ""), "arguments": arguments}
            calls.append({"id": block.text("id", ""), "type": "function", "function": function})
        else:
            texts.append(_text(block))
    chat_message: dict[str, Any] = {"role": "assistant", "content": "\n\n".join(texts)}
    chat_message |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return [chat_message | ({"tool_calls": calls} if calls else {})]


def _tool(tool: Fields) -> dict[str, Any]:
    kind = tool.text("type", "custom")
    if kind != "custom":
        raise refused(tool.name("type"), kind, "the server runs no tools; describe a custom tool")
    function = {"name": tool.get("name"), "description": tool.get("description") or ""}
    schema = tool.inner("input_schema")
    return {"type": "function", "function": function | {"parameters": schema.values if schema else {}}}


# ---- answers ----


class CheckedMessage:
    def __init__(self, service: Service, llm: LLM, jobs: list[ChatJob], stops: Sequence[str]) -> None:
        self.service, self.llm, self.jobs, self._stops = service, llm, jobs, stops
        self._raw: list[str] = []
        self.id = f"msg_{secrets.token_hex(12)}"

    @classmethod
    async def of(cls, service: Service, fields: Fields, llm: LLM) -> CheckedMessage:
        chat = as_chat(fields)
        chat_messages, options = (
            await messages_of(chat, llm, service.config),
            chat_options(service, chat, llm),
        )
        most = service.max_tokens(fields, "max_tokens")
        jobs = await chat_jobs(service.admission, llm, chat_messages, most, 1, options)
        return cls(service, llm, jobs, options.get("stop", ()))

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.service.config.alias,
            "content": content, "stop_reason": None, "stop_sequence": None, "usage": usage,
        }  # fmt: skip

    def _usage(self, tally: Tally) -> dict[str, int]:
        """Return Anthropic's usage, whose `input_tokens` exclude tokens from the cache."""
        return {
            "input_tokens": tally.prompt_n - tally.cached_n, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": tally.cached_n, "output_tokens": tally.n_tokens,
        }  # fmt: skip

    def _end(self, tally: Tally, reason: str) -> dict[str, Any]:
        if reason == "tool_calls":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        stop = stop_met(self.llm, tally, "".join(self._raw), self._stops) or None
        return {"stop_reason": "stop_sequence" if stop else "end_turn", "stop_sequence": stop}

    async def whole(self, request: Request) -> dict[str, Any]:
        blocks, last, reason = Blocks(), None, "stop"
        async for _, chunk, tally in self.service.generate(request, self.llm, self.jobs, streamed=False):
            self._raw.append(chunk.chunk.text)
            for _ in blocks.push(chunk):
                pass
            last, reason = tally, chunk.finish_reason or reason
        assert last is not None
        content = [_block(block, whole=True) for block in blocks.given(reason == "length")]
        return self._message(content, self._usage(last)) | self._end(last, reason)

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        blocks, last, reason = Blocks(), None, "stop"
        async for _, chunk, tally in self.service.generate(request, self.llm, self.jobs, streamed=True):
            if last is None:
                usage = {"input_tokens": tally.prompt_n, "output_tokens": 0}
                yield _event("message_start", message=self._message([], usage))
            self._raw.append(chunk.chunk.text)
            last, reason = tally, chunk.finish_reason or reason
            for change in blocks.push(chunk):
                yield _change(*change)
        for change in blocks.end():
            yield _change(*change)
        assert last is not None
        yield _event("message_delta", delta=self._end(last, reason), usage=self._usage(last))
        yield _event("message_stop")


def _event(name: str, **values: Any) -> bytes:
    return streams.event({"type": name} | values, name)


def _block(block: Block, *, whole: bool) -> dict[str, Any]:
    if block.kind == "thought":
        return {"type": "thinking", "thinking": block.text if whole else "", "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text if whole else ""}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": block.arguments if whole else {}}


def _change(change: str, block: Block, piece: str) -> bytes:
    if change == "begin":
        return _event("content_block_start", index=block.index, content_block=_block(block, whole=False))
    if change == "end":
        return _event("content_block_stop", index=block.index)
    name = {"thought": "thinking", "text": "text", "call": "partial_json"}[block.kind]
    kind = {"thought": "thinking_delta", "text": "text_delta", "call": "input_json_delta"}[block.kind]
    return _event("content_block_delta", index=block.index, delta={"type": kind, name: piece})
