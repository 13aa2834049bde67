"""A model that answers from a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving import FakeModel

from vkbackend.models.chats.answer import ChatChunk
from vkbackend.models.engine.completion import Chunk
from vkbackend.models.engine.messages import PromptProgress
from vkbackend.models.tool_calls.source import ToolDelta


@dataclass(frozen=True)
class Thought:
    text: str


@dataclass(frozen=True)
class Read:
    """A piece of a script that reports how much of the prompt is computed."""

    processed: int
    total: int


@dataclass(frozen=True)
class Wait:
    """A piece of a script that waits until the client disconnects."""


Piece = str | Thought | ToolDelta | Read | Wait | Exception
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Asked:
    ids: Sequence[int]


@dataclass(frozen=True)
class ScriptedChat:
    request: Asked
    generations: list[int]
    model: ScriptedModel
    pieces: Sequence[Piece]

    @property
    def ids(self) -> Sequence[int]:
        return self.request.ids

    async def astream(self) -> AsyncGenerator[ChatChunk, None]:
        self.model.active += 1
        n = len(self.pieces)
        timings = {"prompt_n": float(len(self.request.ids)), "decode_n": float(n), "decode_ms": 10.0}
        rate = {"decode_tokens_per_second": 123.0} | self.model.timings
        called = any(isinstance(piece, ToolDelta) for piece in self.pieces)
        try:
            for i, piece in enumerate(self.pieces):
                await asyncio.sleep(self.model.pause_s)
                if isinstance(piece, Exception):
                    raise piece
                if isinstance(piece, Wait):
                    await asyncio.sleep(3600)
                if isinstance(piece, Read):
                    progress = PromptProgress(piece.total, 0, piece.processed, 1.0)
                    yield ChatChunk("", "", (), None, Chunk("", None, progress=progress))
                    continue
                reason = ("tool_calls" if called else "stop") if i == n - 1 else None
                raw = Chunk("", 65, reason, timings | rate if reason else None)
                content = piece if isinstance(piece, str) else ""
                thought = piece.text if isinstance(piece, Thought) else ""
                calls = (piece,) if isinstance(piece, ToolDelta) else ()
                yield ChatChunk(content, thought, calls, reason, raw)
        finally:
            self.model.active -= 1


@dataclass
class ScriptedModel(FakeModel):
    device_names: tuple[str, ...] = ("card A", "card B")
    script: Callable[[Messages], Sequence[Piece]] = lambda messages: ["ok"]
    asked: list[Messages] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)  # besides the usual

    def prepare_chat(
        self, messages: Messages, max_tokens: int | None = None, n: int = 1, **options: Any
    ) -> ScriptedChat:
        self.asked.append(messages)
        self.options.append(options | {"max_tokens": max_tokens})
        ids = [1] * sum(len(str(message["content"])) for message in messages)
        return ScriptedChat(Asked(ids), list(range(n)), self, self.script(messages))

    def stats(self) -> dict[str, Any]:
        steps = {"n_slots": 2, "cells": 512, "cells_used": 64, "step_ms_p50": 7.0, "reduce_us": 41.5}
        return super().stats() | steps

    def memory(self) -> list[dict[str, Any]]:
        row = {"weights": 3 << 20, "mapped": 0, "kv": 1 << 20, "free": None}
        return [{"device": "Vulkan0"} | row, {"device": "Vulkan1"} | row | {"weights": 1 << 20}]
