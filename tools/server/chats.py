"""Build jobs from OpenAI's conversations, and blocks from answers, for the three chat APIs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vkbackend.checks import finite_number, refused, shown
from vkbackend.errors import InvalidArgument
from vkbackend.models.chats.answer import ChatChunk
from vkbackend.models.chats.prepared_chat import PreparedChat
from vkbackend.models.llm import LLM
from vkbackend.models.tool_calls.calls import is_object
from vkbackend.tools.server.body import Fields
from vkbackend.tools.server.front import Config
from vkbackend.tools.server.generations import Job
from vkbackend.tools.server.images import check_parts, has_images, with_fetched
from vkbackend.tools.server.limits import Admission

ROLES = ("system", "developer", "user", "assistant", "tool")
# Templates get only these fields of a message.
MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
TEMPLATE_FIELDS = (
    "enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "preserve_thinking",
    "clear_thinking",
)  # fmt: skip
MAX_WORD = 64
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_MESSAGES = 10_000


@dataclass(slots=True)
class ChatJob(Job):
    prepared: PreparedChat | None = None

    def start(self, llm: LLM) -> AsyncGenerator[ChatChunk, None]:
        assert self.prepared is not None
        return self.prepared.astream()

    def resume(self, llm: LLM, tokens: Sequence[int]) -> AsyncGenerator[ChatChunk, None]:
        assert self.prepared is not None
        return llm.resume_chat(self.prepared, tokens).astream()


async def chat_jobs(
    admission: Admission,
    llm: LLM,
    messages: Sequence[Mapping[str, Any]],
    most: int | None,
    n: int,
    options: dict[str, Any],
) -> list[ChatJob]:
    """Wait in a thread for the template's process, and for the encoder of images. While a request with images
    waits, the queue's limit counts it. Raises InvalidArgument, Refusal (429)."""

    def prepare() -> PreparedChat:
        return llm.prepare_chat(messages, most, n=n, **options)

    with admission.enter(n if has_images(messages) else 0, streams=False):
        prepared = await asyncio.to_thread(prepare)
    ids = list(prepared.ids)
    return [
        ChatJob(ids, most, options, index=i, prepared=replace(prepared, generations=[generation]))
        for i, generation in enumerate(prepared.generations)
    ]


# ---- requests ----


async def messages_of(fields: Fields, llm: LLM, config: Config) -> list[dict[str, Any]]:
    """Return OpenAI's messages with only MESSAGE_FIELDS, and with the files of remote images."""
    fields.required("messages")
    messages = []
    for message in fields.objects("messages", MAX_MESSAGES):
        message.required("role")
        role = message.word("role", ROLES, "user")
        if role == "developer" and "developer" not in (llm.chat_template or ""):
            role = "system"  # the older name
        kept = {name: message.get(name) for name in MESSAGE_FIELDS if message.has(name)}
        if "content" not in message.values and not (role == "assistant" and len(kept) > 1):
            message.required("content")
        check_parts(f"{message.name('content')}", kept.get("content"))
        messages.append(kept | {"role": role})
    return await with_fetched(config, messages)


def template_fields(given: Fields | None, effort: str | None) -> dict[str, Any]:
    """Return the variables of the template. The effort "none" turns thinking off."""
    variables: dict[str, Any] = {}
    if effort == "none":
        variables["enable_thinking"] = False
    elif effort is not None:
        variables["reasoning_effort"] = effort
    for name, value in (given.values if given else {}).items():
        if name not in TEMPLATE_FIELDS:
            known = ", ".join(TEMPLATE_FIELDS)
            raise InvalidArgument(
                f"chat_template_kwargs.{shown(name)}: allowed are {known}",
                argument="chat_template_kwargs",
            )
        if name == "enable_thinking" and isinstance(value, str):
            raise refused(f"chat_template_kwargs.{name}", value, "expected true or false")
        variables[name] = _plain(f"chat_template_kwargs.{name}", value)
    return variables


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, str) and len(value) <= MAX_WORD:
        return value
    if isinstance(value, int | float):
        return finite_number(name, value, -1e9, 1e9) if isinstance(value, float) else int(value)
    raise refused(name, value, f"expected true, false, a number or a word of at most {MAX_WORD} characters")


# ---- answers ----


@dataclass(slots=True)
class Block:
    """A part of an answer, of kind "thought", "text", or "call" with an id and a name."""

    kind: str
    index: int
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def is_cut(self) -> bool:
        return self.kind == "call" and not is_object(self.text)

    @property
    def arguments(self) -> dict[str, Any]:
        """The call's arguments, or {"arguments": text} if the text is not a JSON object. Without a grammar,
        this can happen."""
        try:
            arguments = json.loads(self.text or "{}")
        except (ValueError, RecursionError):
            arguments = None
        return arguments if isinstance(arguments, dict) else {"arguments": self.text}


class Blocks:
    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def push(self, chunk: ChatChunk) -> Iterator[tuple[str, Block, str]]:
        """Yield ("begin", block, ""), ("piece", block, text) and ("end", block, "")."""
        if chunk.reasoning:
            yield from self._go_on("thought", chunk.reasoning)
        if chunk.content:
            yield from self._go_on("text", chunk.content)
        for call in chunk.tool_calls:
            if call.name is not None:
                yield from self.end()
                yield from self._begin("call", call.id or "", call.name)
            if call.arguments and self._open is not None:
                self._open.pieces.append(call.arguments)
                yield "piece", self._open, call.arguments

    def given(self, was_cut: bool) -> list[Block]:
        """Return the blocks of an answer without the call that a limit truncated."""
        return self.all[:-1] if was_cut and self.all and self.all[-1].is_cut else self.all

    def end(self) -> Iterator[tuple[str, Block, str]]:
        if self._open is not None:
            yield "end", self._open, ""
            self._open = None

    def _go_on(self, kind: str, text: str) -> Iterator[tuple[str, Block, str]]:
        if self._open is None or self._open.kind != kind:
            yield from self.end()
            yield from self._begin(kind)
        assert self._open is not None
        self._open.pieces.append(text)
        yield "piece", self._open, text

    def _begin(self, kind: str, id_: str = "", name: str = "") -> Iterator[tuple[str, Block, str]]:
        self._open = Block(kind, len(self.all), id_, name)
        self.all.append(self._open)
        yield "begin", self._open, ""
