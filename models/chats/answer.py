"""Splits an answer into thought, content and tool calls during generation."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vkbackend.models.engine.completion import Chunk, Completion, report
from vkbackend.models.text.harmony import HarmonyReader
from vkbackend.models.text.reasoning import ReasoningSplit
from vkbackend.models.tool_calls.calls import is_object, new_id
from vkbackend.models.tool_calls.formats import ToolFormat
from vkbackend.models.tool_calls.reader import ToolReader
from vkbackend.models.tool_calls.source import AnswerPart, ToolDelta


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the model. Only a grammar guarantees that `arguments` are valid JSON. Calls that a token
    limit truncates are omitted."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)  # not frozen, like Chunk
class ChatChunk:
    """The content, thought and tool calls in one token's text. The last chunk has `finish_reason`: "stop",
    "length" or "tool_calls"."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolDelta, ...]
    finish_reason: str | None
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """A complete answer. `completion` contains the answer's tokens, seed, timings, logprobs and raw text."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    completion: Completion

    @property
    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        return message


class AnswerReader:
    """If `thinking`, the answer begins in a thought. If `single`, the answer ends with its first tool call
    (`is_over`). If `channels`, the answer is in gpt-oss's Harmony format."""

    def __init__(
        self,
        format_: ToolFormat | None,
        tools: Mapping[str, Any],
        *,
        thinking: bool,
        single: bool,
        channels: bool = False,
    ) -> None:
        self._thoughts = ReasoningSplit(thinking)
        self._harmony = HarmonyReader() if channels else None
        self._calls = ToolReader(format_, tools) if format_ and not channels else None
        self._n_calls = 0
        self._single, self.is_over, self.called = single, False, False
        self._thought, self._begun = thinking, False

    def push(self, chunk: Chunk, *, last: bool = False) -> ChatChunk:
        last = last or chunk.finish_reason is not None
        content, thought, calls = "", "", list[ToolDelta]()
        for part, is_thought in self._parts(chunk.text, last, chunk.finish_reason == "length"):
            if isinstance(part, ToolDelta):
                if not (self._single and part.index > 0):
                    calls.append(part)
            elif self.is_over or (self._single and (calls or self.called) and not is_thought):
                self.is_over = True
                break
            elif is_thought:
                thought += part
            else:
                content += part
        if not self._begun and (self._thought or thought):
            content = content.lstrip()
        self._thought |= bool(thought)
        self._begun |= bool(content)
        self.called |= bool(calls)
        done = self._calls.n_done if self._calls else max(0, self._n_calls - 1)
        self.is_over |= self._single and done > 0
        reason = chunk.finish_reason
        if self.is_over or (reason == "stop" and self.called):
            reason = "tool_calls"
            chunk = replace(chunk, finish_reason="stop", timings=chunk.timings or report(None))
        return ChatChunk(content, thought, tuple(calls), reason, chunk)

    def _parts(self, text: str, last: bool, was_cut: bool) -> Iterable[tuple[AnswerPart, bool]]:
        """Return (part, whether it is a thought) for each part of a text."""
        if self._harmony:
            return list(self._of_channels(self._harmony, text, last))
        if self._calls is None:
            return [(piece.text, piece.is_thought) for piece in self._thoughts.push(text, last=last)]
        parts: list[tuple[AnswerPart, bool]] = []
        for piece in self._thoughts.push(text, last=last):
            if piece.is_thought:
                parts.append((piece.text, True))
            else:
                parts += [(part, False) for part in self._calls.push(piece.text)]
        if last:
            parts += [(part, False) for part in self._calls.push("", last=True, was_cut=was_cut)]
        return parts

    def _of_channels(
        self, reader: HarmonyReader, text: str, last: bool
    ) -> Generator[tuple[AnswerPart, bool], None, None]:
        for part in reader.push(text, last=last):
            if part.recipient and part.begins:
                self._n_calls += 1
                name = part.recipient.removeprefix("functions.")
                yield ToolDelta(self._n_calls - 1, new_id(), name), False
            elif part.recipient:
                yield ToolDelta(self._n_calls - 1, arguments=part.text), False
            elif part.text:
                yield part.text, part.is_thought


def chat_completion(chunks: Sequence[ChatChunk], completion: Completion) -> ChatCompletion:
    heads, texts = list[ToolDelta](), list[str]()
    for call in [call for chunk in chunks for call in chunk.tool_calls]:
        if call.name is not None:
            heads.append(call)
            texts.append("")
        texts[call.index] += call.arguments
    calls = [ToolCall(h.id or "", h.name or "", text) for h, text in zip(heads, texts, strict=True)]
    reason = chunks[-1].finish_reason or completion.finish_reason
    if reason == "length" and calls and not is_object(calls[-1].arguments):
        calls.pop()
    content = "".join(chunk.content for chunk in chunks)
    reasoning = "".join(chunk.reasoning for chunk in chunks).strip()
    return ChatCompletion(content, reasoning, tuple(calls), reason, completion)
