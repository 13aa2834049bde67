from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from device_sets import covering, product

from vkbackend.models.chats.answer import AnswerReader, chat_completion
from vkbackend.models.engine.completion import Chunk, Completion
from vkbackend.models.grammar.compiler import Compiler, Matcher, Vocabulary
from vkbackend.models.grammar.structure import Structure
from vkbackend.models.tool_calls import formats
from vkbackend.models.tool_calls.formats import FORMATS, GENERIC, GPT_OSS, LLAMA3, ToolFormat
from vkbackend.models.tool_calls.grammar import CallGrammar, text_up_to
from vkbackend.models.tool_calls.reader import ToolReader
from vkbackend.models.tool_calls.source import ToolDelta

pytestmark = pytest.mark.no_vulkan

TOOLS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
            "unit": {"enum": ["C", "F"]},
            "at": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "hard": {
        "type": "object",
        "$defs": {"Kind": {"enum": ["a", "b"]}},
        "properties": {
            "kind": {"$ref": "#/$defs/Kind"},
            "level": {"enum": [1, 2]},
            "fixed": {"const": "x"},
            "maybe": {"type": ["string", "null"], "maxLength": 3},
            "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]$"},
            "inner": {
                "type": "object",
                "properties": {"p": {"type": "boolean"}, "q": {"type": "boolean"}},
                "required": ["q"],
                "additionalProperties": False,
            },
        },
        "additionalProperties": False,
    },
    "f": {"type": "object", "properties": {}, "additionalProperties": False},
}
MARKS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|constrain|>",
    "<|tool_call>", "<tool_call|>", '<|"|>', "<arg_key>", "</think>", "<|tool_call_end|>", "<|end|>",
)  # fmt: skip
BYTES = tuple(bytes([b]) for b in range(256))
VALIDATORS = {name: jsonschema.Draft202012Validator(schema) for name, schema in TOOLS.items()}


def vocabulary(with_control: bool) -> Vocabulary:
    marks = tuple(mark.encode() for mark in MARKS) if with_control else (b"<|end|>",)
    return Vocabulary(BYTES + marks, tuple(range(256, 256 + len(marks))), (255 + len(marks),))


def written(matcher: Matcher, words: Vocabulary, rng: random.Random) -> str:
    n, out, end, closer = len(words.pieces), b"", words.stop_ids[0], list[int]()
    while not matcher.is_over:
        matcher.find()
        ids = matcher.allowed(n).tolist()
        if not closer and rng.random() < 0.1:
            closer = list(rng.choice([b"\n</parameter>\n", b"</arg_value>\n", b"<escape>", b'<|"|>', b'"']))
        if closer and closer[0] in ids:
            token = closer.pop(0)
        else:
            closer = []
            if end in ids and rng.random() < 0.3:
                token = end
            else:
                marks = rng.random() < 0.5
                few = [i for i in ids if i >= 256 or words.pieces[i] in b'"}]<'] if marks else []
                token = rng.choice(few or ids)
        if token != end:
            out += words.pieces[token]
        matcher.take(token)
        assert len(out) < 4000, out
        if token == end:
            break
    return out.decode(errors="replace")


def of_channels(text: str) -> tuple[str, list[tuple[str, Any]]]:
    reader = AnswerReader(GPT_OSS, TOOLS, thinking=False, single=False, channels=True)
    completion = chat_completion(
        [reader.push(Chunk(text, 1, "stop", {}))], Completion(text, [], "stop", {}, [], 0)
    )
    return completion.content, [(call.name, json.loads(call.arguments)) for call in completion.tool_calls]


def calls_of(format_: ToolFormat, text: str) -> tuple[str, list[tuple[str, Any]]]:
    if format_ is GPT_OSS:
        return of_channels(text)
    reader = ToolReader(format_, TOOLS)
    content, names, arguments = "", list[str](), list[str]()
    for delta in reader.push(text, last=True):
        if isinstance(delta, str):
            content += delta
        elif delta.name is not None:
            names.append(delta.name)
            arguments.append(delta.arguments)
        else:
            assert isinstance(delta, ToolDelta)
            arguments[delta.index] += delta.arguments
    return content, [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]


@pytest.mark.parametrize(
    ("format_", "several", "with_control"),
    covering([pytest.param(f, id=f.name) for f in FORMATS], product([False, True], [False, True])),
)
def test_forced_calls_are_parsed(format_: ToolFormat, several: bool, with_control: bool) -> None:
    words, rng = vocabulary(with_control), random.Random(len(format_.name))
    ids = {mark: 256 + i for i, mark in enumerate(MARKS)} if with_control else {}
    lark = "start: calls\n" + CallGrammar(format_, TOOLS, ids.get).lark(several=several)
    compiler, counts, called = Compiler(words), set[int](), set[str]()
    for _ in range(16):
        matcher = compiler.start(compiler.compile(Structure("lark", lark)).result(60))
        text = written(matcher, words, rng)
        content, calls = calls_of(format_, text)
        assert content == "" and calls, text
        counts.add(len(calls))
        called.update(name for name, _ in calls)
        for name, arguments in calls:
            VALIDATORS[name].validate(arguments)
    assert len(called) == len(TOOLS), "every function was called"
    one_at_a_time = format_ in (LLAMA3, GENERIC, GPT_OSS)
    assert max(counts) > 1 or not several or one_at_a_time
    compiler.close()


def test_a_key_is_not_a_marker() -> None:
    tools = {
        "f": {
            "type": "object",
            "properties": {"a><|end|><b": {"type": "string"}},
            "required": ["a><|end|><b"],
        }
    }
    lark = CallGrammar(formats.QWEN_CODER, tools, {"<|end|>": 256}.get).lark(several=False)
    assert "<[256]>" not in lark


@pytest.mark.parametrize("with_control", [False, True])
def test_a_thought_may_precede_the_calls(with_control: bool) -> None:
    ids = {mark: 256 + i for i, mark in enumerate(MARKS)} if with_control else {}
    lark = f"start: thought calls\n{text_up_to('thought', '</think>', ids.get)}\n"
    lark += CallGrammar(GENERIC, TOOLS, ids.get).lark(several=False)
    words = vocabulary(with_control)
    compiler = Compiler(words)
    matcher = compiler.start(compiler.compile(Structure("lark", lark)).result(60))
    end = [256 + MARKS.index("</think>")] if with_control else list(b"</think>")
    for token in [*b'I {"name": "f", "arguments": {}}', *end, *b'{"name": "f", "arguments": {}}']:
        matcher.find()
        assert token in matcher.allowed(len(words.pieces)) and not matcher.is_over
        matcher.take(token)
    assert matcher.is_over
    compiler.close()
