"""OpenAI's /v1/responses. The server stores nothing, so a request must contain the complete conversation."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vkbackend.checks import refused
from vkbackend.models.chats.answer import ChatChunk
from vkbackend.models.llm import LLM
from vkbackend.tools.server import streams
from vkbackend.tools.server.body import Fields
from vkbackend.tools.server.chat_completions import MAX_TOOLS, chat_options, rendered_prompt, respond
from vkbackend.tools.server.chats import MAX_MESSAGES, Block, Blocks, ChatJob, chat_jobs, messages_of
from vkbackend.tools.server.front import Json
from vkbackend.tools.server.generations import Tally, now
from vkbackend.tools.server.images import merged, of_responses
from vkbackend.tools.server.service import Service

STORED = "conversations are not stored; send all messages as `input`"
REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("previous_response_id", (), STORED),
    ("conversation", (), STORED),
    ("prompt", (), "prompts are not stored; send `instructions` and `input`"),
    ("background", (False,), "responses are only generated while the client waits"),
)
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


async def responses(service: Service, request: Request) -> Response:
    return await respond(service, request, CheckedResponse.of)


async def count_response_tokens(service: Service, request: Request) -> Response:
    prompt = await rendered_prompt(service, request, as_chat)
    return Json({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


# ---- requests, as chat completions ----


def as_chat(fields: Fields) -> Fields:
    """Raises InvalidArgument."""
    for name, harmless, why in REFUSED:
        fields.refuse(name, *harmless, why=why)
    kept = {name: value for name, value in fields.values.items() if name not in ("input", "tools", "text")}
    messages: list[dict[str, Any]] = []
    if instructions := fields.text("instructions", ""):
        messages.append({"role": "system", "content": instructions})
    fields.required("input")
    given = fields.get("input")
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        _add_items(fields, messages)
    kept["messages"] = messages
    if fields.has("tools"):
        kept["tools"] = [_tool(tool) for tool in fields.objects("tools", MAX_TOOLS)]
    choice = fields.get("tool_choice")
    if isinstance(choice, Mapping) and "function" not in choice:
        kept["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    if (reasoning := fields.inner("reasoning")) is not None:
        kept["reasoning_effort"] = reasoning.get("effort")
    if (text := fields.inner("text")) is not None and (form := text.inner("format")) is not None:
        kept["response_format"] = _form(form)
    return Fields(kept)


def _form(form: Fields) -> dict[str, Any]:
    if form.get("type") == "json_schema":
        form.required("schema")
        return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    return {"type": form.get("type")}


def _tool(tool: Fields) -> dict[str, Any]:
    tool.refuse("type", "function", why="functions are the only tools supported")
    names = "name", "description", "parameters", "strict"
    return {"type": "function", "function": {name: tool.get(name) for name in names if tool.has(name)}}


def _add_items(fields: Fields, messages: list[dict[str, Any]]) -> None:
    """Append the items of `input`. Thoughts and calls join the assistant's message."""

    def assistant() -> dict[str, Any]:
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for item in fields.objects("input", MAX_MESSAGES):
        kind = item.text("type", "message")
        if kind == "message":
            item.required("role")
            role = item.get("role")
            content: Any = _parts(item, "content") if role == "user" else _content(item, "content")
            if role == "assistant" and messages and messages[-1]["role"] == "assistant":
                messages[-1]["content"] += content
            else:
                messages.append({"role": role, "content": content})
        elif kind == "reasoning":
            text = _content(item, "content") or _content(item, "summary")
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        elif kind == "function_call":
            function = {"name": item.text("name", ""), "arguments": item.text("arguments", "{}")}
            call = {"id": item.text("call_id", ""), "type": "function", "function": function}
            assistant().setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _parts(item, "output")
            messages.append({"role": "tool", "tool_call_id": item.text("call_id", ""), "content": output})
        else:
            raise refused(
                item.name("type"), kind, "expected message, reasoning, function_call or function_call_output"
            )


def _parts(item: Fields, name: str) -> str | list[dict[str, Any]]:
    value = item.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    parts = item.objects(name, MAX_MESSAGES)
    return merged([of_responses(p) if p.get("type") == "input_image" else _text(p) for p in parts], "")


def _content(item: Fields, name: str) -> str:
    value = item.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    return "".join(_text(part) for part in item.objects(name, MAX_MESSAGES))


def _text(part: Fields) -> str:
    kind = part.get("type")
    if kind not in TEXT_PARTS:
        raise refused(part.name("type"), kind, f"expected one of {', '.join(TEXT_PARTS)}")
    return part.text("text", "")


# ---- answers ----


class CheckedResponse:
    def __init__(
        self, service: Service, fields: Fields, llm: LLM, jobs: list[ChatJob], most: int | None
    ) -> None:
        self.service, self.llm, self.jobs = service, llm, jobs
        self._fields, self._most, self._created = fields, most, now()
        self.id = _id("resp")
        self._ids: list[str] = []  # of output items

    @classmethod
    async def of(cls, service: Service, fields: Fields, llm: LLM) -> CheckedResponse:
        chat = as_chat(fields)
        messages, options = await messages_of(chat, llm, service.config), chat_options(service, chat, llm)
        most = service.max_tokens(fields, "max_output_tokens")
        jobs = await chat_jobs(service.admission, llm, messages, most, 1, options)
        return cls(service, fields, llm, jobs, most)

    def _response(self, status: str, output: list[dict[str, Any]], tally: Tally | None) -> dict[str, Any]:
        f, usage = self._fields, None
        if tally is not None:
            usage = {
                "input_tokens": tally.prompt_n,
                "input_tokens_details": {"cached_tokens": tally.cached_n},
                "output_tokens": tally.n_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": tally.prompt_n + tally.n_tokens,
            }
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id, "object": "response", "created_at": self._created, "status": status, "error": None,
            "incomplete_details": cut, "instructions": f.get("instructions"), "max_output_tokens": self._most,
            "model": self.service.config.alias, "output": output, "usage": usage,
            "parallel_tool_calls": f.switch("parallel_tool_calls", True), "previous_response_id": None,
            "reasoning": f.get("reasoning") or {"effort": None, "summary": None}, "store": False,
            "temperature": f.get("temperature"), "text": f.get("text") or {"format": {"type": "text"}},
            "tool_choice": f.get("tool_choice") or "auto", "tools": f.get("tools") or [],
            "top_p": f.get("top_p"), "truncation": "disabled", "metadata": f.get("metadata") or {},
        }  # fmt: skip

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        text, done = block.text, status != "in_progress"
        while len(self._ids) <= block.index:
            self._ids.append(_id({"thought": "rs", "text": "msg", "call": "fc"}[block.kind]))
        id_ = self._ids[block.index]
        if block.kind == "thought":
            content = [{"type": "reasoning_text", "text": text}] if done else []
            return {"id": id_, "type": "reasoning", "summary": [], "content": content, "status": status}
        if block.kind == "call":
            call = {"call_id": block.id, "name": block.name, "arguments": text if done else ""}
            return {"id": id_, "type": "function_call", "status": status} | call
        content = [_part(text)] if done else []
        return {"id": id_, "type": "message", "status": status, "role": "assistant", "content": content}

    def _output(self, blocks: Blocks, status: str) -> list[dict[str, Any]]:
        given = blocks.given(status == "incomplete")
        return [self._item(block, status if block is blocks.all[-1] else "completed") for block in given]

    async def whole(self, request: Request) -> dict[str, Any]:
        blocks, last = Blocks(), None
        async for _, chunk, tally in self.service.generate(request, self.llm, self.jobs, streamed=False):
            for _ in blocks.push(chunk):
                pass
            last = tally
        assert last is not None
        status = _status(last)
        return self._response(status, self._output(blocks, status), last)

    async def events(self, request: Request) -> AsyncGenerator[bytes, None]:
        number = -1

        def event(kind: str, /, **values: Any) -> bytes:
            nonlocal number
            number += 1
            return streams.event({"type": kind, "sequence_number": number} | values, kind)

        blocks, last, begun = Blocks(), None, False
        async for _, chunk, tally in self.service.generate(request, self.llm, self.jobs, streamed=True):
            assert isinstance(chunk, ChatChunk)
            if not begun:
                begun = True
                response = self._response("in_progress", [], None)
                yield event("response.created", response=response)
                yield event("response.in_progress", response=response)
            last = tally
            for change in blocks.push(chunk):
                for kind, values in self._changes(*change):
                    yield event(kind, **values)
        assert last is not None
        status = _status(last)
        for change in blocks.end():
            for kind, values in self._changes(*change, status):
                yield event(kind, **values)
        response = self._response(status, self._output(blocks, status), last)
        yield event(f"response.{status}", response=response)

    def _changes(
        self, change: str, block: Block, piece: str, status: str = "completed"
    ) -> list[tuple[str, dict[str, Any]]]:
        at: dict[str, Any] = {"output_index": block.index}
        item = self._item(block, "in_progress" if change == "begin" else status)
        if change == "begin":
            events = [("response.output_item.added", at | {"item": item})]
            if block.kind == "text":
                part = {"item_id": item["id"], "content_index": 0, "part": _part("")}
                events.append(("response.content_part.added", at | part))
            return events
        at["item_id"] = item["id"]
        name, whole = {
            "text": ("response.output_text", "text"),
            "thought": ("response.reasoning_text", "text"),
            "call": ("response.function_call_arguments", "arguments"),
        }[block.kind]
        if block.kind != "call":
            at["content_index"] = 0
        more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if change == "piece":
            return [(f"{name}.delta", at | more | {"delta": piece})]
        if block.kind == "call":
            more = {"name": block.name}
        events = [(f"{name}.done", at | more | {whole: block.text})]
        if block.kind == "text":
            events.append(("response.content_part.done", at | {"part": _part(block.text)}))
        return [*events, ("response.output_item.done", {"output_index": block.index, "item": item})]


def _status(tally: Tally) -> str:
    return "incomplete" if tally.finish_reason == "length" else "completed"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"
