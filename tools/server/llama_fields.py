"""The fields of llama-server that every generating endpoint accepts, except fields for sampling
(sampling.py)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from vkbackend.models.chats.answer import ChatChunk
from vkbackend.models.draft_options import MAX_DRAFT
from vkbackend.models.llm import LLM
from vkbackend.models.options import MAX_CONTEXT
from vkbackend.tools.server.body import Fields
from vkbackend.tools.server.generations import J, Piece, Tally, raw_chunk
from vkbackend.tools.server.service import Service

MAX_PROBS = 100
REASONING_FORMATS = ("none", "auto", "deepseek")
MAX_INT = (1 << 31) - 1
MAX_RESPONSE_FIELDS = 64
# (field, harmless values, why other values are refused)
REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("adaptive_target", (-1, -1.0), "this sampler is not supported"),
    ("parse_tool_calls", (True,), "calls are parsed if the request has tools; omit the tools"),
    ("grammar_lazy", (False,), "a grammar applies from the first token; tool calls need no lazy grammar"),
)  # fmt: skip


class LlamaFields:
    """The checked fields of a request. `options` are keywords for `LLM.astream`. Raises InvalidArgument."""

    def __init__(self, service: Service, fields: Fields, llm: LLM) -> None:
        for name, harmless, why in REFUSED:
            fields.refuse(name, *harmless, why=why)
        self.is_verbose = fields.switch("verbose", service.config.is_verbose)
        self.streams = fields.switch("stream")
        self.n_probs = fields.whole("n_probs", 0, MAX_PROBS, 0)
        self.times_tokens = fields.switch("timings_per_token")
        self.returns_tokens = fields.switch("return_tokens")
        self.shows_progress = fields.switch("return_progress") and self.streams
        self.limit_ms = fields.whole("t_max_predict_ms", -1, (1 << 63) - 1, -1)
        self.n_indent = fields.whole("n_indent", 0, MAX_INT, 0)
        # If contexts never shift, these fields change nothing, as in llama-server.
        self.n_keep = fields.whole("n_keep", -1, MAX_INT, llm.n_keep)
        self.n_discard = fields.whole("n_discard", 0, MAX_INT, 0)
        fields.whole("n_cache_reuse", 0, MAX_INT, 0)  # only saves time
        fields.switch("backend_sampling")  # ignored
        fields.switch("echo")
        fields.word("reasoning_format", REASONING_FORMATS, None)
        self.response_fields = fields.items("response_fields", MAX_RESPONSE_FIELDS)
        self.ping_s = self._ping_s(fields)
        self.slot = fields.whole("id_slot", -1, llm.n_slots - 1, -1)
        self.options: dict[str, Any] = {}
        if self.n_keep != llm.n_keep:
            self.options["n_keep"] = min(self.n_keep, MAX_CONTEXT)
        if self.n_discard:
            self.options["n_discard"] = min(self.n_discard, MAX_CONTEXT)
        if (n_max := fields.whole("speculative.n_max", 0, MAX_INT, -1)) >= 0:
            self.options["draft_max"] = min(n_max, MAX_DRAFT)
        for name in ("speculative.n_min", "speculative.p_min"):
            fields.number(name, 0, MAX_INT, 0)  # The server's flags set these values.
        if self.n_probs:
            self.options["logprobs"] = self.n_probs
        if self.slot >= 0:
            self.options["slot"] = self.slot
        if not fields.switch("cache_prompt", True):
            self.options["cache_prompt"] = False
        if self.shows_progress:
            self.options["prompt_progress"] = True
        if self.times_tokens:
            self.options["timings_per_token"] = True

    def _ping_s(self, fields: Fields) -> float | None:
        """Return the seconds of `sse_ping_interval`, infinite for -1, or None if the request has none."""
        seconds = fields.whole("sse_ping_interval", -1, MAX_INT, None)
        if seconds is None:
            return None
        return float("inf") if seconds <= 0 else float(seconds)

    def check_jobs(self, jobs: Sequence[Any]) -> None:
        if len(jobs) > 1:
            named = (
                ("id_slot", self.slot >= 0), ("t_max_predict_ms", self.limit_ms > 0),
                ("n_indent", self.n_indent > 0),
            )  # fmt: skip
            for name, value in named:
                Fields({name: 1 if value else None}).refuse(name, why="it is limited to a single sequence")

    async def chunks(
        self, service: Service, request: Request, llm: LLM, jobs: Sequence[J]
    ) -> AsyncGenerator[tuple[J, Any, Tally], None]:
        """Yield the chunks of `Service.generate`, and add their texts to the tallies. End a sequence after
        `t_max_predict_ms` and a line break, or at a line with fewer than `n_indent` spaces."""
        began, is_limited = None, self.limit_ms > 0 or self.n_indent > 0
        async with aclosing(service.generate(request, llm, jobs, streamed=self.streams)) as source:
            async for job, piece, tally in source:
                tally.text.append(raw_chunk(piece).text)
                if is_limited and tally.n_tokens and tally.finish_reason is None:
                    began = began or time.monotonic()
                    text = "".join(tally.text)
                    is_late = 0 < self.limit_ms < 1e3 * (time.monotonic() - began) and "\n" in text
                    n_cut = self._n_cut(text)
                    if is_late or n_cut:
                        tally.finish_reason = "length"
                        yield job, _ended(piece, tally, n_cut), tally
                        return
                yield job, piece, tally

    def _n_cut(self, text: str) -> int:
        """Return how many characters to remove from the last line if it has text and too few spaces."""
        line = text.rpartition("\n")[2]
        rest = line.lstrip(" \t")
        is_short = self.n_indent and "\n" in text and len(line) - len(rest) < self.n_indent
        return len(rest) if is_short else 0


def _ended(piece: Piece, tally: Tally, n_cut: int) -> Piece:
    chunk = raw_chunk(piece)
    text = chunk.text[: max(0, len(chunk.text) - n_cut)]
    tally.text[-1] = text
    chunk = replace(chunk, text=text, finish_reason="length", timings=chunk.timings or tally.timings)
    if not isinstance(piece, ChatChunk):
        return chunk
    content = piece.content[: max(0, len(piece.content) - n_cut)]
    return replace(piece, content=content, finish_reason="length", chunk=chunk)
