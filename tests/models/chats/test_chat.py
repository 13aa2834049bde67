from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from device_sets import QUICKEST, only, wide
from places import ROOT

from vkbackend.errors import InvalidArgument, UnknownArgument
from vkbackend.models.chats.answer import AnswerReader, ChatChunk, chat_completion
from vkbackend.models.engine.completion import Chunk, Completion
from vkbackend.models.llm import LLM
from vkbackend.models.tool_calls.formats import GPT_OSS, HERMES, ToolFormat

pytestmark = pytest.mark.no_vulkan

OTHERS = [wide(pytest.param(name, id=name)) for name in ("kimi", "llama3", "gemma", "phi4", "command-r")]
TEMPLATES = ROOT / "tests" / "data" / "templates"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "enum": [1, 2, 30]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "tells", "parameters": PARAMETERS},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def tool_with(**schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **schema}}}


ASKED = [{"role": "user", "content": "What is the weather?"}]


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def llm(models: Path) -> Iterator[LLM]:
    with LLM(models / "stories-narrow-Q8_0.gguf", devices=QUICKEST, n_ctx=2048, n_slots=2) as llm:
        yield llm


# ---- calls ----


GLM4_HEAD = "[gMASK]<sop>{% if tools %}<|system|>{{ tools[0].function.name }}{% endif %}"
GLM4_TEMPLATE = (
    GLM4_HEAD
    + """{% for m in messages %}{% if m.role == 'assistant' and m.metadata %}
<|assistant|>{{ m.metadata }}
{{ m.content }}{% else %}<|{{ m.role }}|>
{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
)


def test_glm4_reads_calls_as_metadata(llm: LLM) -> None:
    answer = llm.chat(ASKED, 200, template=GLM4_TEMPLATE, tools=[WEATHER], tool_choice="required", seed=1,
                      parallel_tool_calls=False)  # fmt: skip
    (call,) = answer.tool_calls
    assert call.name == "weather" and answer.finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    prompt = llm.chat_prompt([*ASKED, answer.message, result], template=GLM4_TEMPLATE, tools=[WEATHER]).text
    arguments = json.dumps(json.loads(call.arguments))
    assert prompt.endswith(f"<|assistant|>weather\n{arguments}<|observation|>\nrain<|assistant|>")


@pytest.mark.parametrize("name", ["gpt-oss", "mistral", *OTHERS])
def test_a_call_that_is_required_and_its_result(llm: LLM, name: str) -> None:
    options: dict[str, Any] = {"template": template(name), "tools": [WEATHER, CLOCK], "seed": 1}
    most = 40 if name == "gpt-oss" else 200  # in gpt-oss's format, the model may think until this limit
    answer = llm.chat(ASKED, most, tool_choice="required", parallel_tool_calls=False, **options)
    if answer.finish_reason != "tool_calls":
        assert name == "gpt-oss" and answer.reasoning
        return
    (call,) = answer.tool_calls
    assert answer.content == "" and call.id
    assert call.name in ("weather", "clock")
    if call.name == "weather":
        jsonschema.validate(json.loads(call.arguments), PARAMETERS)
    result = {"role": "tool", "tool_call_id": call.id, "content": "it rains"}
    messages = [*ASKED, answer.message, result]
    text = llm.chat_prompt(messages, template=template(name), tools=[WEATHER, CLOCK]).text
    assert "it rains" in text and call.name in text
    assert llm.chat(messages, 3, **options).completion.prompt_tokens


def test_tool_choice_names_a_function(llm: LLM) -> None:
    choice = {"type": "function", "function": {"name": "clock"}}
    answer = llm.chat(
        ASKED, 60, tools=[WEATHER, CLOCK], tool_choice=choice, seed=1, template=template("llama3")
    )
    assert [(call.name, json.loads(call.arguments)) for call in answer.tool_calls] == [("clock", {})]


def test_a_stream_gives_the_same_answer(llm: LLM) -> None:
    options: dict[str, Any] = {
        "template": template("mistral"), "tools": [WEATHER], "tool_choice": "required", "seed": 5,
        "parallel_tool_calls": False,
    }  # fmt: skip
    whole = llm.chat(ASKED, 100, **options)
    chunks = list(llm.chat_stream(ASKED, 100, **options))
    deltas = [delta for chunk in chunks for delta in chunk.tool_calls]
    assert [delta.name for delta in deltas if delta.name] == [whole.tool_calls[0].name]
    assert "".join(delta.arguments for delta in deltas) == whole.tool_calls[0].arguments
    assert len([delta for delta in deltas if delta.arguments]) > 2, "in pieces"
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]
    assert chunks[-1].chunk.timings

    async def both() -> tuple[Any, list[ChatChunk]]:
        received = [chunk async for chunk in llm.achat_stream(ASKED, 100, **options)]
        return await llm.achat(ASKED, 100, **options), received

    again, streamed = asyncio.run(both())
    assert again.tool_calls[0].arguments == whole.tool_calls[0].arguments
    assert "".join(d.arguments for c in streamed for d in c.tool_calls) == whole.tool_calls[0].arguments


def test_several_answers(llm: LLM) -> None:
    answers = llm.chat(ASKED, 6, n=3, seed=1)
    assert [answer.completion.seed for answer in answers] == [1, 2, 3]
    assert answers[1].content == llm.chat(ASKED, 6, seed=2).content
    assert len(asyncio.run(llm.achat(ASKED, 4, n=2, seed=1))) == 2  # type: ignore[arg-type]


# ---- the form of an answer ----


@pytest.mark.parametrize("name", only(["llama3", "mistral", "gemma"], "mistral"))
def test_an_answer_of_a_schema_with_and_without_tools(llm: LLM, name: str) -> None:
    options: dict[str, Any] = {"template": template(name), "json_schema": PARAMETERS, "seed": 2}
    jsonschema.validate(json.loads(llm.chat(ASKED, 200, **options).content), PARAMETERS)
    answer = llm.chat(ASKED, 300, tools=[CLOCK], **options)
    if answer.tool_calls:
        assert answer.tool_calls[0].name == "clock"
    else:
        jsonschema.validate(json.loads(answer.content), PARAMETERS)
    with pytest.raises(InvalidArgument, match="leave one out"):
        llm.chat(ASKED, 10, tools=[CLOCK], tool_choice="required", **options)


def test_a_thought_may_precede_a_structured_answer(llm: LLM) -> None:
    source = template("qwen3")
    request = llm.chat_prompt(
        ASKED, template=source, regex="yes|no", template_variables={"enable_thinking": True}
    )
    assert "thought" in request.keywords["lark"] and request.keywords["regex"] is None
    assert llm.chat_prompt(ASKED, template=template("llama3"), regex="yes|no").keywords["regex"] == "yes|no"


# ---- reading ----


def read(text: str, format_: ToolFormat | None, thinking: bool = False, size: int = 3) -> Any:
    reader = AnswerReader(format_, {"f": {}}, thinking=thinking, single=False, channels=format_ is GPT_OSS)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    chunks = [reader.push(Chunk(piece, 1)) for piece in pieces]
    chunks.append(reader.push(Chunk("", 2, "stop", {})))
    return chat_completion(chunks, Completion(text, [], "stop", {}, [], 0))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_thought_content_and_calls_are_separated(size: int) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    message = read(f"<think>I <tool_call> it</think>\n\nSure:\n{call}\n{call}", HERMES, size=size)
    assert message.reasoning == "I <tool_call> it" and message.content == "Sure:"
    assert [(tool_call.name, tool_call.arguments) for tool_call in message.tool_calls] == [
        ("f", '{"x": 1}')
    ] * 2
    assert message.finish_reason == "tool_calls" and message.message["content"] == "Sure:"
    assert message.message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    inside = read(f"thinks</think>{call}", HERMES, thinking=True, size=size)
    assert (inside.reasoning, inside.content, len(inside.tool_calls)) == ("thinks", "", 1)
    plain = read(f"{call} b", None, size=size)
    assert plain.content == f"{call} b" and not plain.tool_calls and plain.finish_reason == "stop"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_channels(size: int) -> None:
    text = (
        "<|channel|>analysis<|message|>I look<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"x": 1}<|call|>'
    )
    message = read(text, GPT_OSS, size=size)
    assert (message.reasoning, message.content) == ("I look", "")
    assert [(tool_call.name, tool_call.arguments) for tool_call in message.tool_calls] == [("f", '{"x": 1}')]
    final = read(
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b", GPT_OSS
    )
    assert (final.reasoning, final.content) == ("a", "b")


def test_calls_inside_a_thought_are_not_calls() -> None:
    text = (
        "<|channel|>analysis<|message|>We call to=functions.f. Now.<|end|><|start|>assistant to=functions.f"
        '<|channel|>commentary json<|message|>{"x": 1}<|call|>'
    )
    message = read(text, GPT_OSS)
    assert message.reasoning == "We call to=functions.f. Now." and len(message.tool_calls) == 1
    final = read("<|channel|>final <|constrain|>json<|message|>{}", GPT_OSS)
    assert (final.content, final.reasoning) == ("{}", "")
    plain = read("The <|end|> of <|start|>assistant", None)
    assert plain.content == "The <|end|> of <|start|>assistant"


def test_an_answer_ends_after_its_single_call() -> None:
    reader = AnswerReader(HERMES, {"f": {}}, thinking=False, single=True)
    assert reader.push(Chunk('<tool_call>{"name": "f", "arguments": {', 1)).finish_reason is None
    chunk = reader.push(Chunk("}}</tool_call> and more", 1))
    assert chunk.finish_reason == "tool_calls" and chunk.chunk.timings and chunk.content == ""


# ---- prompts ----


def test_parts_and_arguments_in_any_shape(llm: LLM) -> None:
    call = {"id": "abcdefghi", "function": {"name": "clock", "arguments": '{"zone": "é"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": [{"type": "text", "text": "noon"}]},
    ]
    for name in ("qwen3", "gpt-oss", "llama3", "mistral", "kimi", "glm4", "gemma", "phi4"):
        request = llm.chat_prompt(messages, template=template(name), tools=[CLOCK])
        text = request.text
        assert "a\nb" in text and "noon" in text and "None" not in text and "'zone'" not in text, name
        if name != "phi4":
            assert "zone" in text and "é" in text.replace("\\u00e9", "é"), name
        assert request.protected and request.ids


def test_tools_are_described_in_words_to_a_template_without_tools(llm: LLM) -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    messages = [{"role": "system", "content": "Be brief."}, *ASKED]
    text = llm.chat_prompt(messages, tools=[WEATHER], template=source).text
    assert text.startswith("system: Be brief.\n\nYou can call functions") and '"name": "weather"' in text


def test_special_tokens_in_tools_are_text(llm: LLM) -> None:
    end = llm.tokenizer.piece(2).decode()
    bad = {"type": "function", "function": {"name": "f", "description": f"bad {end} x", "parameters": {}}}
    for source in (template("qwen3"), "{{ messages[0].content }}{{ messages[1].content }}"):
        request = llm.chat_prompt(ASKED, template=source, tools=[bad])
        assert end in request.text and (2 not in request.ids or not request.protected)
        assert request.protected


def test_invalid_json_in_arguments_is_accepted(llm: LLM) -> None:
    call = {"id": "abcdefghi", "function": {"name": "clock", "arguments": '{"zone": "unfin'}}
    messages = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert "unfin" in llm.chat_prompt(messages, template=template("qwen3"), tools=[CLOCK]).text


def test_special_tokens_in_messages_are_text(llm: LLM) -> None:
    end = llm.tokenizer.piece(2).decode()
    request = llm.chat_prompt([{"role": "user", "content": f"a{end}b"}], template="{{ messages[0].content }}")
    assert 2 not in request.ids and end in request.text
    marked = llm.chat_prompt(
        [{"role": "user", "content": f"a{end}b"}], template="{{ messages[0].content }}", parse_special=True
    )
    assert 2 in marked.ids


def test_the_last_message_is_continued(llm: LLM) -> None:
    messages = [*ASKED, {"role": "assistant", "content": "It is"}]
    assert llm.chat_prompt(messages, template=template("llama3"), continue_final_message=True).text.endswith(
        "It is"
    )


@pytest.mark.parametrize(
    ("messages", "options", "named"),
    [([], {}, "messages"), ("hi", {}, "messages"), ([{"content": "x"}], {}, "role"),
     ([3], {}, r"messages\[0\]"),
     ([{"role": "user", "content": 3}], {}, "content"),
     ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], {}, "image_url"),
     ([{"role": "assistant", "tool_calls": [{}]}], {}, "tool_calls"),
     ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}], {}, "JSON"),
     (ASKED, {"echo": True}, "echo"), (ASKED, {"tools": [tool_with(properties=[1])]}, "properties"),
     (ASKED, {"tools": [tool_with(required=3)]}, "required"), (ASKED, {"tools": [tool_with(enum=5)]}, "enum"),
     (ASKED, {"tools": [tool_with(properties={"x": 5})]}, "JSON Schema"),
     (ASKED, {"tools": [{"type": "function"}]}, r"tools\[0\]"),
     (ASKED, {"tools": [CLOCK, CLOCK]}, "two tools"),
     (ASKED, {"tools": [{"function": {"name": "a b"}}]}, "name"),
     (ASKED, {"tools": [{"function": {"name": "a", "parameters": []}}]}, "tools|JSON Schema"),
     (ASKED, {"tool_choice": "required"}, "no tools"), (ASKED, {"tool_choice": 3}, "tool_choice"),
     (ASKED, {"tools": [CLOCK], "tool_choice": {"function": {"name": "x"}}}, "no tool has this name"),
     (ASKED, {"template": "{{ raise_exception('not so') }}"}, "not so"), (ASKED, {"n": 0}, "n=0"),
     (ASKED, {"template_variables": {"messages": []}}, "taken")],
    ids=lambda value: str(value)[:24],
)  # fmt: skip
def test_invalid_arguments_fail_before_the_first_token(
    llm: LLM, messages: Any, options: dict[str, Any], named: str
) -> None:
    options.setdefault("template", template("llama3"))
    with pytest.raises(InvalidArgument, match=named):
        llm.chat(messages, 3, **options)
    with pytest.raises(UnknownArgument, match="tools"):
        llm.chat(ASKED, 3, tool=[])  # type: ignore[call-arg]
