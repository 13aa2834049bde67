"""The tests truncate calls of every format after each character."""

from __future__ import annotations

import json

import pytest
from device_sets import covering

from vkbackend.models.chats.answer import AnswerReader, ChatCompletion, chat_completion
from vkbackend.models.engine.completion import Chunk, Completion
from vkbackend.models.tool_calls import formats
from vkbackend.models.tool_calls.formats import ToolFormat

pytestmark = pytest.mark.no_vulkan

TOOLS = {"f": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}}
ARGUMENTS = {"a": "x y", "b": 12}
WRITTEN = json.dumps(ARGUMENTS)
OBJECT = f'{{"name": "f", "arguments": {WRITTEN}}}'
PARAMETERS = "<function=f>\n<parameter=a>\nx y\n</parameter>\n<parameter=b>\n12\n</parameter>\n</function>\n"
PAIRS = "<arg_key>a</arg_key>\n<arg_value>x y</arg_value>\n<arg_key>b</arg_key>\n<arg_value>12</arg_value>\n"
CALLS: list[tuple[ToolFormat | None, str]] = [
    (formats.HERMES, f"<tool_call>\n{OBJECT}\n</tool_call>"),
    (formats.QWEN_CODER, f"<tool_call>\n{PARAMETERS}</tool_call>"),
    (formats.SEED, f"<seed:tool_call>\n{PARAMETERS}</seed:tool_call>"),
    (formats.GLM, f"<tool_call>f\n{PAIRS}</tool_call>"),
    (formats.HUNYUAN, f"<tool_calls><tool_call>f\n```json\n{WRITTEN}\n```</tool_call></tool_calls>"),
    (formats.HUNYUAN_ARRAY, f"<tool_calls>[{OBJECT}]</tool_calls>"),
    (formats.HUNYUAN_KEYS, f"<tool_calls>\n<tool_call>f<tool_sep>\n{PAIRS}</tool_call>\n</tool_calls>"),
    (formats.MISTRAL, f"[TOOL_CALLS][{OBJECT}]"),
    (formats.MISTRAL_ARGS, f"[TOOL_CALLS]f[CALL_ID]1[ARGS]{WRITTEN}"),
    (formats.PHI4, f"<|tool_call|>[{OBJECT}]<|/tool_call|>"),
    (formats.KIMI, "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
     f"{WRITTEN}<|tool_call_end|><|tool_calls_section_end|>"),
    (formats.GEMMA, '<|tool_call>call:f{a:<|"|>x y<|"|>,b:12}<tool_call|>'),
    (formats.DEEPSEEK, f"{formats.CALLS}{formats.CALL}f{formats.SEPARATOR}{WRITTEN}{formats.CALL_END}"
     f"{formats.CALLS_END}"),
    (None, f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{WRITTEN}"),
]  # fmt: skip


ON_BOTH = covering([pytest.param(*call, id=getattr(call[0], "name", "")) for call in CALLS], [False, True])


def answer_of(format_: ToolFormat | None, pieces: list[str], reason: str, *, single: bool) -> ChatCompletion:
    """Return the answer for a text in pieces. If `format_` is None, the format is Harmony (gpt-oss)."""
    reader = AnswerReader(format_, TOOLS, thinking=False, single=single, channels=format_ is None)
    chunks = [reader.push(Chunk(piece, 1)) for piece in pieces] + [reader.push(Chunk("", 1, reason, {}))]
    over = next((i for i, chunk in enumerate(chunks) if chunk.finish_reason), len(chunks) - 1)
    return chat_completion(chunks[: over + 1], Completion("".join(pieces), [], reason, {}, [], 0))


@pytest.mark.parametrize(("format_", "text", "single"), ON_BOTH)
def test_a_cut_call_is_not_in_the_answer(format_: ToolFormat | None, text: str, single: bool) -> None:
    for n in range(len("I look."), len(text)):
        for pieces in ([text[:n]], list(text[:n])):
            answer = answer_of(format_, pieces, "length", single=single)
            given = [json.loads(call.arguments) for call in answer.tool_calls]
            assert given in ([], [ARGUMENTS]), (n, pieces)
            assert answer.finish_reason == ("tool_calls" if single and given else "length"), (n, pieces)
            markers = [m for m in (format_.openers if format_ else ()) if m in text[:n]]
            assert not any(m in answer.content for m in markers), (n, pieces)
    whole = answer_of(format_, [text], "stop", single=single)
    assert [json.loads(call.arguments) for call in whole.tool_calls] == [ARGUMENTS]
    assert whole.finish_reason == "tool_calls"


def test_calls_before_the_cut_call_are_in_the_answer() -> None:
    text = f"I look. <tool_call>{OBJECT}</tool_call><tool_call>{OBJECT[:-9]}"
    answer = answer_of(formats.HERMES, list(text), "length", single=False)
    assert answer.content == "I look." and answer.finish_reason == "length"
    assert [json.loads(call.arguments) for call in answer.tool_calls] == [ARGUMENTS]


def test_a_cut_text_that_mentions_a_marker_is_whole() -> None:
    for text in ("Write <tool_call> first", '```json\n{"x": 1', "Use ``` then"):
        assert answer_of(formats.HERMES, list(text), "length", single=False).content == text
