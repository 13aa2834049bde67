from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from serving import PROCESSES, Address, one_model

from vkbackend.models.llm import LLM
from vkbackend.tools.flags.text import demo_model

if TYPE_CHECKING:  # The imports take 3 s, and every worker collects this file.
    import anthropic
    import openai

pytestmark = pytest.mark.no_vulkan

SAID = "Once upon a time there was a girl"
ASKED: list[Any] = [{"role": "user", "content": SAID}]
WEATHER = {
    "type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": WEATHER}}
]
KEY = "a-key"


@pytest.fixture(scope="module", params=PROCESSES)
def server(request: pytest.FixtureRequest) -> Iterator[Address]:
    words = ("--metrics", "-np", "2", "--temp", "0", "--api-key", KEY)
    with one_model(*words, process=request.param) as address:
        yield address


@pytest.fixture(scope="module")
def client(server: Address) -> openai.OpenAI:
    import openai

    url = f"http://127.0.0.1:{server.port}/v1"
    return openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def claude(server: Address) -> anthropic.Anthropic:
    import anthropic

    url = f"http://127.0.0.1:{server.port}"
    return anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def expected() -> str:
    with LLM(demo_model(), devices="numpy") as llm:
        return llm.chat(ASKED, 12, temperature=0).content


# ---- OpenAI ----


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "demo" and client.models.retrieve("demo").id == "demo"


def test_chat(client: openai.OpenAI, expected: str) -> None:
    done = client.chat.completions.create(model="demo", messages=ASKED, max_tokens=12)
    assert done.choices[0].message.content == expected and done.choices[0].finish_reason == "length"
    assert done.usage is not None and done.usage.completion_tokens == 12 and done.usage.prompt_tokens > 4
    stream = client.chat.completions.create(
        model="demo", messages=ASKED, max_completion_tokens=12, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "length" and chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12


def test_contents_in_parts_and_other_roles(client: openai.OpenAI, expected: str) -> None:
    import openai

    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": SAID}]}]
    done = client.chat.completions.create(model="demo", messages=parts, max_tokens=12)
    assert done.choices[0].message.content == expected
    more: list[Any] = [{"role": "developer", "content": "Tell."}, *parts]
    assert client.chat.completions.create(model="demo", messages=more, max_tokens=2).choices
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client.chat.completions.create(model="demo", messages=image)  # type: ignore[arg-type]


def test_logprobs_and_several(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model="demo",
        messages=ASKED,
        max_tokens=4,
        n=2,
        temperature=1.2,
        seed=3,
        logprobs=True,
        top_logprobs=2,
    )
    assert [choice.index for choice in done.choices] == [0, 1]
    for choice in done.choices:
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert "".join(row.token for row in choice.logprobs.content) == choice.message.content
        assert all(len(row.top_logprobs) == 2 for row in choice.logprobs.content)


def test_tools(client: openai.OpenAI) -> None:
    """The test forces the call, because the demo model never calls tools by itself."""
    done = client.chat.completions.create(
        model="demo", messages=ASKED, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    assert done.choices[0].finish_reason == "tool_calls"
    (call,) = done.choices[0].message.tool_calls or []
    assert call.type == "function" and call.id
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    chosen: Any = {"type": "function", "function": {"name": "weather"}}
    stream = client.chat.completions.create(
        model="demo", messages=ASKED, tools=TOOLS, tool_choice=chosen, stream=True
    )
    deltas = [d for c in stream if c.choices for d in c.choices[0].delta.tool_calls or []]
    assert deltas[0].id and deltas[0].function and deltas[0].function.name == "weather"
    text = "".join(d.function.arguments or "" for d in deltas if d.function)
    assert json.loads(text) == {"city": "Oslo"} and {d.index for d in deltas} == {0}
    answered: list[Any] = [
        *ASKED, done.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]  # fmt: skip
    more = client.chat.completions.create(model="demo", messages=answered, tools=TOOLS, max_tokens=2)
    assert more.choices[0].message.content is not None


@pytest.mark.wide
def test_a_call_cut_by_max_tokens_is_no_call(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": "demo", "messages": ASKED, "tools": TOOLS, "tool_choice": "required",
                  "parallel_tool_calls": False}  # fmt: skip
    usage = client.chat.completions.create(**asked).usage
    assert usage
    most = usage.completion_tokens - 4
    choice = client.chat.completions.create(**asked, max_tokens=most).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls, choice.message.content) == ("length", None, "")
    most -= 8  # At the other endpoints, calls have fewer tokens.
    last = list(client.chat.completions.create(**asked, max_tokens=most, stream=True))[-1]
    assert last.choices[0].finish_reason == "length"
    tools: list[Any] = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}]
    form: Any = {"model": "demo", "input": SAID, "tools": tools, "tool_choice": "required",
                 "parallel_tool_calls": False}  # fmt: skip
    done = client.responses.create(**form, max_output_tokens=most)
    assert done.status == "incomplete" and not done.output
    events = list(client.responses.create(**form, max_output_tokens=most, stream=True))
    items = [event.item for event in events if event.type == "response.output_item.done"]
    assert [getattr(item, "status", None) for item in items] == ["incomplete"]
    assert events[-1].type == "response.incomplete" and not events[-1].response.output
    message: Any = {"model": "demo", "messages": ASKED, "tool_choice": {"type": "tool", "name": "weather"},
                    "tools": [{"name": "weather", "input_schema": WEATHER}]}  # fmt: skip
    said = claude.messages.create(**message, max_tokens=most)
    assert said.stop_reason == "max_tokens" and not said.content


def test_response_format(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER, "strict": True}}
    done = client.chat.completions.create(model="demo", messages=ASKED, response_format=form)
    assert json.loads(done.choices[0].message.content or "") == {"city": "Oslo"}


def test_errors_are_typed(client: openai.OpenAI, server: Address) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=ASKED, temperature=-1, top_p=7)
    assert caught.value.param == "top_p"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "a b " * 9000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=client.base_url, api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.BadRequestError, match="names no pooling"):
        client.embeddings.create(model="demo", input="a")
    with pytest.raises(openai.InternalServerError, match="not supported yet") as refused:
        client.audio.transcriptions.create(model="demo", file=("a.wav", b"RIFF"))
    assert refused.value.status_code == 501 and refused.value.response.headers["x-should-retry"] == "false"
    for field in ({"chat_template": "{{ 1 }}"}, {"chat_template_kwargs": {"messages": []}},
                  {"chat_template_kwargs": {"enable_thinking": "x" * 65}}, {"tools": [{"type": "web"}]},
                  {"messages": [{"role": "root", "content": "a"}]}, {"tool_choice": "required"},
                  {"functions": [{"name": "a"}]}, {"top_logprobs": 3}, {"messages": []}):  # fmt: skip
        body = {"messages": ASKED, "max_tokens": 1} | field
        status, answer, _ = server.post("/v1/chat/completions", body, Authorization=f"Bearer {KEY}")
        assert status == 400, (field, answer)


def test_completions(client: openai.OpenAI) -> None:
    done = client.completions.create(model="demo", prompt=SAID, max_tokens=3, logprobs=1, echo=True)
    assert done.choices[0].text.startswith(SAID) and done.choices[0].logprobs is not None
    pieces = list(client.completions.create(model="demo", prompt=SAID, max_tokens=3, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == done.choices[0].text.removeprefix(SAID)


def test_responses(client: openai.OpenAI, expected: str) -> None:
    done = client.responses.create(model="demo", input=SAID, max_output_tokens=12)
    assert done.output_text == expected
    assert done.status == "incomplete" and done.incomplete_details is not None
    assert done.usage is not None and done.usage.output_tokens == 12
    with client.responses.stream(model="demo", input=SAID, max_output_tokens=12) as stream:
        events = list(stream)
    numbers = [event.sequence_number for event in events]
    assert numbers == sorted(numbers) and events[0].type == "response.created"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == expected
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == expected


def test_responses_with_tools(client: openai.OpenAI) -> None:
    import openai

    tools: list[Any] = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}]
    done = client.responses.create(model="demo", input=SAID, tools=tools, tool_choice="required",
                                   parallel_tool_calls=False)  # fmt: skip
    (call,) = [item for item in done.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
    chosen: Any = {"type": "function", "name": "weather"}
    with client.responses.stream(model="demo", input=SAID, tools=tools, tool_choice=chosen) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.function_call_arguments.delta")
    assert json.loads(text) == {"city": "Oslo"}
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": SAID}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": call.call_id, "name": "weather", "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    assert client.responses.create(model="demo", input=items, tools=tools, max_output_tokens=2).output
    form: Any = {"format": {"type": "json_schema", "name": "w", "schema": WEATHER}}
    response = client.responses.create(model="demo", input=SAID, text=form)
    assert json.loads(response.output_text) == {"city": "Oslo"} and response.status == "completed"
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="demo", input=SAID, previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="only tools"):
        client.responses.create(model="demo", input=SAID, tools=[{"type": "web_search"}])


# ---- Anthropic ----


def test_messages(claude: anthropic.Anthropic, expected: str) -> None:
    done = claude.messages.create(model="demo", max_tokens=12, messages=ASKED)
    assert done.content[0].type == "text" and done.content[0].text == expected
    assert done.stop_reason == "max_tokens" and done.usage.output_tokens == 12
    with claude.messages.stream(model="demo", max_tokens=12, messages=ASKED) as stream:
        assert "".join(stream.text_stream) == expected
        final = stream.get_final_message()
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 12
    counted = claude.messages.count_tokens(model="demo", messages=ASKED)
    usage = done.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_stop_sequences(claude: anthropic.Anthropic, expected: str) -> None:
    word = expected.split()[2]
    done = claude.messages.create(
        model="demo", max_tokens=30, messages=ASKED, stop_sequences=["none such", word]
    )
    assert (done.stop_reason, done.stop_sequence) == ("stop_sequence", word)


def test_tool_use(claude: anthropic.Anthropic) -> None:
    tools: list[Any] = [{"name": "weather", "description": "Of a city", "input_schema": WEATHER}]
    choice: Any = {"type": "tool", "name": "weather"}
    done = claude.messages.create(
        model="demo", max_tokens=60, messages=ASKED, tools=tools, tool_choice=choice
    )
    call = done.content[-1]
    assert call.type == "tool_use" and (call.name, call.input) == ("weather", {"city": "Oslo"})
    assert done.stop_reason == "tool_use"
    with claude.messages.stream(
        model="demo", max_tokens=60, messages=ASKED, tools=tools, tool_choice=choice
    ) as stream:
        last = stream.get_final_message().content[-1]
    assert last.type == "tool_use" and last.input == {"city": "Oslo"}
    answered: list[Any] = [
        *ASKED, {"role": "assistant", "content": [{"type": "text", "text": "Hm."}, call.model_dump()]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "And now?"}]},
    ]  # fmt: skip
    assert claude.messages.create(model="demo", max_tokens=2, messages=answered, tools=tools).content


def test_a_billing_header_does_not_change_the_prompt(claude: anthropic.Anthropic) -> None:
    counts = []
    for header in ([], [{"type": "text", "text": "x-anthropic-billing-header: abc=1;"}]):
        system: Any = [*header, {"type": "text", "text": "You are kind."}]
        counts.append(claude.messages.count_tokens(model="demo", system=system, messages=ASKED).input_tokens)
    assert counts[0] == counts[1]


def test_errors_of_anthropic(claude: anthropic.Anthropic) -> None:
    import anthropic

    image: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "a"}}]}]
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model="demo", max_tokens=1, messages=image)
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=str(claude.base_url), api_key="no", max_retries=0).messages.create(
            model="demo", max_tokens=1, messages=ASKED
        )


# ---- curl ----


def curl(server: Address, *words: str) -> str:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = ["curl", "-sS", "-N", "-H", f"Authorization: Bearer {KEY}", *words]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl(server: Address, expected: str) -> None:
    url = f"http://127.0.0.1:{server.port}/v1"
    body = json.dumps({"messages": ASKED, "max_tokens": 12})
    # curl does not set the Content-Type of JSON by default
    answer = json.loads(curl(server, f"{url}/chat/completions", "-d", body))
    assert answer["choices"][0]["message"]["content"] == expected
    streamed = curl(server, f"{url}//chat/completions", "-d", body[:-1] + ', "stream": true}')
    assert streamed.endswith("data: [DONE]\n\n")
    prompt = json.loads(curl(server, f"{url}/apply-template", "-d", body))["prompt"]
    assert SAID in prompt
    assert "llamacpp:" in curl(server, f"{url}/metrics")
    assert json.loads(curl(server, "-X", "POST", f"{url}/chat/completions"))["error"]["message"]
