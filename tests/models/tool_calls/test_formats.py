"""Tool calls of every format are parsed: complete calls, calls in pieces, calls next to text, and damaged
calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT

from vkbackend.models.tool_calls.argument_values import value_of
from vkbackend.models.tool_calls.calls import MAX_HEAD
from vkbackend.models.tool_calls.formats import (
    DEEPSEEK,
    FORMATS,
    FUNCTION_GEMMA,
    GEMMA,
    GENERIC,
    GLM,
    GLM4,
    GPT_OSS,
    HERMES,
    HUNYUAN,
    HUNYUAN_ARRAY,
    HUNYUAN_KEYS,
    KIMI,
    LENIENT,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    PHI4,
    QWEN_CODER,
    SEED,
    ToolFormat,
    format_of,
)
from vkbackend.models.tool_calls.reader import ToolReader
from vkbackend.models.tool_calls.source import JsonEnd, ToolDelta

pytestmark = pytest.mark.no_vulkan

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "at": {"type": "array"}},
    },
    "f": {"type": "object", "properties": {}},
}
Calls = list[tuple[str, Any]]
WEATHER: Calls = [("weather", {"city": 'a "b" {c}\n', "days": 3})]
BOTH: Calls = [*WEATHER, ("f", {})]
DS = [chr(0xFF5C), chr(0x2581)]


def ds(words: str) -> str:
    return f"<{DS[0]}{words.replace(' ', DS[1])}{DS[0]}>"


CITY = '{"city": "a \\"b\\" {c}\\n", "days": 3}'
W, F = f'{{"name": "weather", "arguments": {CITY}}}', '{"name": "f", "arguments": {}}'
CASES: list[tuple[ToolFormat, str, Calls]] = [
    (HERMES, f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>', WEATHER),
    (HERMES, f'<tool_call>{{"arguments": {CITY}, "name": "weather"}}</tool_call>', WEATHER),
    (HERMES, f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>\n'
     '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', BOTH),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', BOTH[1:]),
    (QWEN_CODER, "<tool_call>\n<function=weather>\n<parameter=city>\na \"b\" {c}\n\n</parameter>\n"
     "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=f>\n</function>\n"
     "</tool_call>", BOTH),
    (QWEN_CODER, "<function=weather>\n<parameter=city>\na \"b\" {c}\n\n\n<parameter=days>\n3\n</function>"
     "<function=f></function>", BOTH),
    (SEED, "<seed:tool_call>\n<function=weather>\n<parameter=city>a \"b\" {c}\n\n</parameter>\n"
     "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>", WEATHER),
    (LENIENT, f'<tool_call>{{"name": "weather", "arguments": {CITY}}}</tool_call>', WEATHER),
    (LENIENT, f'{{"name": "weather", "arguments": {CITY}}}', WEATHER),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', BOTH[1:]),
    (GLM, "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>a \"b\" {c}\n</arg_value>\n"
     "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>f\n</tool_call>", BOTH),
    (LLAMA3, f'{{"name": "weather", "parameters": {CITY}}}', WEATHER),
    (LLAMA3, f'<|python_tag|>{{"name": "weather", "parameters": {CITY}}}; '
     '{"name": "f", "parameters": {}}', BOTH),
    (GENERIC, f'\n{{"name": "weather", "arguments": {CITY}}}', WEATHER),
    (MISTRAL, f'[TOOL_CALLS][{{"name": "weather", "arguments": {CITY}, "id": "abcdefghi"}}, '
     '{"name": "f", "arguments": {}}]', BOTH),
    (MISTRAL_ARGS, f"[TOOL_CALLS]weather[ARGS]{CITY}[TOOL_CALLS]f[CALL_ID]x1[ARGS]{{}}", BOTH),
    (MISTRAL_ARGS, f"[TOOL_CALLS]weather{CITY}[TOOL_CALLS]f[ARGS]{{}}", BOTH),
    (MISTRAL_ARGS, f"[TOOL_CALLS]weather[ARGS]{CITY}f[ARGS]{{}}", BOTH),
    (MISTRAL_ARGS, f"[TOOL_CALLS] weather[CALL_ID]x1[ARGS]{CITY},\nf[CALL_ID]x2[ARGS]{{}}", BOTH),
    (MISTRAL_ARGS, f"[TOOL_CALLS]weather{CITY}\nf{{}}", BOTH),
    (MISTRAL_ARGS, f"[TOOL_CALLS] [{W},\n{F}]", BOTH),
    (MISTRAL, f"[TOOL_CALLS]{W}\n{F}", BOTH),
    (HERMES, f"```xml\n<tool_call>\n{W}\n</tool_call>\n<tool_call>{F}</tool_call>\n```", BOTH),
    (HERMES, f"<tool_call>\n```json\n{W}\n```\n</tool_call>", WEATHER),
    (HERMES, f"```json\n{W}\n```", WEATHER),
    (HERMES, f'```\n{{"arguments": {CITY}, "name": "weather"}}\n{F}```', BOTH),
    (LENIENT, f"```json\n{W}\n```", WEATHER),
    (GENERIC, f"```json\n{W}\n```", WEATHER),
    (GLM4, f"weather\n{CITY}", WEATHER),
    (GLM4, f"\nweather\n{CITY}<|assistant|>f\n{{}}", BOTH),
    (GLM4, f"weather\n```json\n{CITY}\n```\n<|assistant|>\nf\n{{}}", BOTH),
    (HUNYUAN, f"<tool_calls>\n<tool_call>weather\n```json\n{CITY}\n```\n</tool_call>\n<tool_call>f\n"
     "```json\n{}\n```\n</tool_call>\n</tool_calls>", BOTH),
    (HUNYUAN, f"<tool_calls><tool_call>function<tool_sep>weather\n```json\n{CITY}\n```</tool_call>"
     "</tool_calls>", WEATHER),
    (HUNYUAN, f"<tool_call>weather\n```\n{CITY}\n```</tool_call><tool_call>f{{}}</tool_call>", BOTH),
    (HUNYUAN_ARRAY, f"<tool_calls>[{W}, {F}]</tool_calls>", BOTH),
    (HUNYUAN_ARRAY, f"<tool_calls>\n{W}\n{F}\n</tool_calls>", BOTH),
    (HUNYUAN_KEYS, "<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>a "
     "\"b\" {c}\n</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
     "<tool_call>f<tool_sep>\n</tool_call>\n</tool_calls>", BOTH),
    (KIMI, "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
     f"{CITY}<|tool_call_end|><|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{{}}"
     "<|tool_call_end|><|tool_calls_section_end|>", BOTH),
    (GEMMA, '<|tool_call>call:weather{city:<|"|>a "b" {c}\n<|"|>,days:3}<tool_call|>'
     "<|tool_call>call:f{}<tool_call|>", BOTH),
    (FUNCTION_GEMMA, '<start_function_call>call:weather{city:<escape>a "b" {c}\n<escape>,days:3}'
     "<end_function_call>", WEATHER),
    (PHI4, f'<|tool_call|>[{{"name": "weather", "arguments": {CITY}}}, {{"name": "f", "arguments": {{}}}}]'
     "<|/tool_call|>", BOTH),
    (DEEPSEEK, f"{ds('tool calls begin')}{ds('tool call begin')}weather{ds('tool sep')}{CITY}"
     f"{ds('tool call end')}{ds('tool call begin')}f{ds('tool sep')}{{}}{ds('tool call end')}"
     f"{ds('tool calls end')}", BOTH),
    (DEEPSEEK, f"{ds('tool calls begin')}{ds('tool call begin')}function{ds('tool sep')}weather\n```json\n"
     f"{CITY}\n```{ds('tool call end')}{ds('tool calls end')}", WEATHER),
]  # fmt: skip


def read(format_: ToolFormat, pieces: list[str]) -> tuple[str, Calls]:
    reader, content, calls = ToolReader(format_, TOOLS), "", dict[int, list[Any]]()
    deltas = [delta for piece in pieces for delta in reader.push(piece)] + reader.push("", last=True)
    for delta in deltas:
        if isinstance(delta, str):
            content += delta
        elif delta.name is not None:
            assert delta.index == len(calls) and delta.id
            calls[delta.index] = [delta.name, delta.arguments]
        else:
            calls[delta.index][1] += delta.arguments
    return content, [(name, json.loads(text)) for name, text in calls.values()]


@pytest.mark.parametrize(("format_", "text", "calls"), CASES, ids=lambda v: getattr(v, "name", ""))
def test_at_once_and_by_character(format_: ToolFormat, text: str, calls: Calls) -> None:
    assert read(format_, [text]) == ("", calls)
    assert read(format_, list(text)) == ("", calls)
    with_cases = {case[0].name for case in CASES} | {GPT_OSS.name}
    assert with_cases == {tool_format.name for tool_format in FORMATS}, "every format has a case"


@given(data=st.data())
def test_pieces_of_any_size_give_the_same(data: st.DataObject) -> None:
    format_, text, calls = data.draw(st.sampled_from(CASES))
    before = (
        ""
        if format_.at_start or format_.by_name
        else data.draw(st.sampled_from(["", "I look:\n\n", "a < b, <", "{ }"]))
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(before + text)), max_size=12)))
    whole = before + text
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert read(format_, pieces) == (before.rstrip(), calls)


def test_a_fenced_object_with_an_unknown_first_key_is_text() -> None:
    format_ = next(case[0] for case in CASES if case[0].name == "hermes")
    text = '```\n{":arguments": {}, "name": "weather"}\n```'
    for pieces in ([text], list(text)):
        reader = ToolReader(format_, TOOLS)
        deltas = [delta for piece in pieces for delta in reader.push(piece)] + reader.push("", last=True)
        assert "".join(delta for delta in deltas if isinstance(delta, str)) == text


@given(data=st.data())
def test_damaged_calls_are_read_without_an_error(data: st.DataObject) -> None:
    format_, text, _ = data.draw(st.sampled_from(CASES))
    at = data.draw(st.integers(0, len(text)))
    noise = data.draw(st.text("{}[]\"'<>|:,= \nax", max_size=8))
    for damaged in (text[:at], text[:at] + noise + text[at:], noise + text):
        reader = ToolReader(format_, TOOLS)
        whole = reader.push(damaged, last=True)
        by_one = ToolReader(format_, TOOLS)
        pieces = [delta for c in damaged for delta in by_one.push(c)] + by_one.push("", last=True)
        joined = ["".join(o for o in deltas if isinstance(o, str)) for deltas in (whole, pieces)]
        assert joined[0] == joined[1]
        assert reader.n_calls == by_one.n_calls
    plain = ToolReader(format_, TOOLS).push(noise, last=True)
    assert "".join(str(delta) for delta in plain).split() == noise.split()


STREAMED = [
    HERMES, LLAMA3, GENERIC, LENIENT, MISTRAL, MISTRAL_ARGS, KIMI, PHI4, DEEPSEEK, GLM4, HUNYUAN,
    HUNYUAN_ARRAY,
]  # fmt: skip


@pytest.mark.parametrize("format_", STREAMED, ids=lambda f: f.name)
def test_arguments_stream_as_they_come(format_: ToolFormat) -> None:
    text = next(text for item, text, _ in CASES if item is format_)
    reader = ToolReader(format_, TOOLS)
    deltas = reader.push(text[: text.index('"days"')])
    given_on = "".join(item.arguments for item in deltas if isinstance(item, ToolDelta))
    assert given_on.startswith('{"city"') and isinstance(deltas[0], ToolDelta) and deltas[0].name == "weather"


def test_json_that_names_no_known_tool_is_an_answer() -> None:
    for text in ('{"name": "Ann", "parameters": {}}', '{"x": 1}', "{", "{}", '{"name": 3}'):
        assert read(LLAMA3, list(text)) == (text, [])
    assert read(HERMES, ["a <tool_call>no</tool_call> b"]) == ("a <tool_call>no</tool_call> b", [])


@pytest.mark.parametrize(
    "text",
    ['```python\nprint("<tool_call>")\n```\nDone.', '```json\n{"name": "Ann", "arguments": {}}\n```\nEnd',
     '```json\n{"x": [1, 2]}\n```', "Say <tool_call> or ``` in a text. `f`", '```\n["weather"]\n```'],
)  # fmt: skip
def test_a_code_block_without_a_known_call_is_content(text: str) -> None:
    assert read(HERMES, [text]) == read(HERMES, list(text)) == (text, [])


def test_a_fence_that_ends_a_code_block_begins_no_call() -> None:
    text, call = "```sh\nls\n```", '<tool_call>{"name": "f"}</tool_call>'
    assert read(HERMES, [f"{text}\n{call}"]) == read(HERMES, list(f"{text}\n{call}")) == (text, BOTH[1:])


def test_a_json_block_that_is_no_call_streams() -> None:
    reader = ToolReader(HERMES, TOOLS)
    assert "".join(str(part) for part in reader.push('```json\n{"x": [1, 2, ')) == '```json\n{"x": [1, 2,'


def test_text_after_mistral_calls_is_content() -> None:
    text = "[TOOL_CALLS]f[ARGS]{} weather is {fine}"
    assert read(MISTRAL_ARGS, [text]) == read(MISTRAL_ARGS, list(text)) == ("weather is {fine}", BOTH[1:])


def test_a_glm4_call_follows_text() -> None:
    for before in ("I look.\n", "I look.<|assistant|>"):
        text = f"{before}f\n{{}}"
        assert read(GLM4, [text]) == read(GLM4, list(text)) == ("I look.", BOTH[1:])
    for text in ("f\nis a letter", "weather is fine\nf", "f"):
        assert read(GLM4, [text]) == read(GLM4, list(text)) == (text, [])


def test_a_text_argument_is_not_parsed_as_json() -> None:
    text = "<tool_call>weather<arg_key>city</arg_key><arg_value>3</arg_value><arg_key>at</arg_key>"
    text += "<arg_value>[1, 2]</arg_value><arg_key>new</arg_key><arg_value>so</arg_value></tool_call>"
    assert read(GLM, [text])[1] == [("weather", {"city": "3", "at": [1, 2], "new": "so"})]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [("123", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "123"), ("1", {"enum": ["1", "2"]}, "1"),
     ("null", {"type": ["string", "null"]}, None), ("NaN", {"type": "number"}, "NaN"),
     ("True", {"type": "boolean"}, True), ("2", {"enum": [1, 2]}, 2), ("b", {"const": "b"}, "b")],
    ids=str,
)  # fmt: skip
def test_values_follow_the_schema(text: str, schema: Any, value: Any) -> None:
    assert value_of(text, schema) == value


@pytest.mark.parametrize(
    ("body", "arguments"),
    [("city:Paris", {"city": "Paris"}), ("$x:1,a b:[1,two]", {"$x": 1, "a b": [1, "two"]}),
     ("e:{f:true,g:null}", {"e": {"f": True, "g": None}}), ('x:<|"|><tool><|"|>', {"x": "<tool>"})],
)  # fmt: skip
def test_gemma_writes_keys_and_words_without_quotes(body: str, arguments: Any) -> None:
    assert read(GEMMA, [f"<|tool_call>call:f{{{body}}}<tool_call|>"]) == ("", [("f", arguments)])


def test_a_call_that_never_ends_costs_no_more_per_token() -> None:
    reader = ToolReader(HERMES, TOOLS)
    for _ in range(4000):
        assert not [delta for delta in reader.push("abcd") if isinstance(delta, ToolDelta)]
    reader = ToolReader(HERMES, TOOLS)
    reader.push('<tool_call>{"name": "')
    for _ in range(MAX_HEAD):
        reader.push("abcd")
    assert len(reader.source.text) > MAX_HEAD and reader.n_calls == 0


def test_formats_follow_from_templates() -> None:
    formats = {
        path.stem: format_of(path.read_text(encoding="utf-8")).name
        for path in sorted(Path(ROOT / "tests" / "data" / "templates").glob("*.jinja"))
    }
    assert formats == {
        "command-r": formats["command-r"], "deepseek": "generic", "gemma": "generic", "glm4": "glm-4.5",
        "gpt-oss": "gpt-oss", "kimi": "kimi k2", "llama3": "llama 3", "mistral": "mistral", "phi4": "phi-4",
        "qwen3": "hermes",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("template", "format_"),
    [("[gMASK]<sop>{{ m.metadata }}", GLM4), ("'<tool_calls>[' + x", HUNYUAN_ARRAY),
     ("<tool_calls><tool_call>{{ name }}\n```json", HUNYUAN),
     ("<tool_calls><tool_call>{{ name }}<tool_sep><arg_key>", HUNYUAN_KEYS)],
)  # fmt: skip
def test_formats_of_further_templates(template: str, format_: ToolFormat) -> None:
    assert format_of(template) is format_


JSON = st.recursive(
    st.none() | st.booleans() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, st.data())
def test_the_end_of_json(value: Any, data: st.DataObject) -> None:
    text = json.dumps({"v": value}, ensure_ascii=data.draw(st.booleans()))
    whole = text + data.draw(st.sampled_from(["", "}", "]", ', {"a": 1}']))
    end, at = JsonEnd(), 0
    while True:
        n = data.draw(st.integers(1, 5))
        length = end.push(whole[at : at + n])
        if length is not None:
            assert at + length == len(text)
            break
        at += n
        assert at < len(whole)
