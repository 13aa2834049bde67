"""LiteLLM, LangChain and Cohere's client use `vkbackend serve` with a real model.

The clients need 100 packages of 400 MB together: `pip install -e .[clients]`.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from rerankers import bert_reranker
from serving import Command

from vkbackend.models.llm import LLM
from vkbackend.tools.flags.text import demo_model

pytestmark = [pytest.mark.no_vulkan, pytest.mark.wide]

MISSING = "needs LiteLLM and LangChain: pip install -e .[clients]"
KEY = "a-key"
SAID = "Once upon a time there was a girl"
ASKED: list[Any] = [{"role": "user", "content": SAID}]
CITY = {
    "title": "weather", "description": "Of a city", "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city", "parameters": CITY},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Command]:
    command = Command("-np", "2", "--temp", "0", "--api-key", KEY)
    yield command
    assert command.end() == 0, command.log


@pytest.fixture(scope="module")
def expected() -> str:
    with LLM(demo_model(), devices="numpy") as llm:
        return llm.chat(ASKED, 12, temperature=0).content


@pytest.fixture(autouse=True)
def only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages may not connect to other servers, for example for prices or telemetry."""
    for name in ("LITELLM_LOCAL_MODEL_COST_MAP", "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS"):
        monkeypatch.setenv(name, "True")  # LiteLLM reads this on import
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    look_up = socket.getaddrinfo

    def local(host: Any, *args: Any, **options: Any) -> Any:
        assert host in ("127.0.0.1", b"127.0.0.1"), f"somebody looks for {host!r}"
        return look_up(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", local)


def url_of(server: Command) -> str:
    return f"http://127.0.0.1:{server.address.port}/v1"


# ---- LiteLLM ----


@pytest.fixture
def litellm(only_here: None) -> Any:
    return pytest.importorskip("litellm", reason=MISSING)


@pytest.fixture
def given(server: Command) -> dict[str, Any]:
    return {"model": "openai/demo", "api_base": url_of(server), "api_key": KEY, "messages": ASKED,
            "num_retries": 0}  # fmt: skip


def test_litellm_chat(litellm: Any, given: dict[str, Any], expected: str) -> None:
    done = litellm.completion(**given, max_tokens=12)
    assert done.choices[0].message.content == expected and done.choices[0].finish_reason == "length"
    assert done.usage.completion_tokens == 12
    chunks = list(
        litellm.completion(**given, max_tokens=12, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)] == [12]


def test_litellm_text(litellm: Any, given: dict[str, Any]) -> None:
    asked = {name: value for name, value in given.items() if name != "messages"}
    asked |= {"model": "text-completion-openai/demo", "prompt": SAID, "max_tokens": 4}
    text = litellm.text_completion(**asked).choices[0].text
    pieces = [chunk.choices[0].text or "" for chunk in litellm.text_completion(**asked, stream=True)]
    assert text and "".join(pieces) == text


def test_litellm_tools(litellm: Any, given: dict[str, Any]) -> None:
    asked = given | {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    message = litellm.completion(**asked).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
    rebuilt = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)), messages=ASKED)
    (again,) = rebuilt.choices[0].message.tool_calls
    assert (again.function.name, json.loads(again.function.arguments)) == ("weather", {"city": "Oslo"})
    conversation = [
        *ASKED,
        message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    after = litellm.completion(**given | {"messages": conversation, "tools": [TOOL], "max_tokens": 2})
    assert after.choices[0].message.content is not None


def test_litellm_structure(litellm: Any, given: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": CITY, "strict": True}}
    done = litellm.completion(**given, response_format=form)
    assert json.loads(done.choices[0].message.content) == {"city": "Oslo"}


def test_litellm_errors(litellm: Any, given: dict[str, Any]) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**given | {"api_key": "wrong"})
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        litellm.completion(**given, top_p=7)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**given | {"messages": [{"role": "user", "content": "a b " * 9000}]})
    with pytest.raises(litellm.BadRequestError):
        list(litellm.completion(**given, stream=True, top_p=7))


# ---- LangChain ----


@pytest.fixture
def chat(only_here: None, server: Command) -> Any:
    package = pytest.importorskip("langchain_openai", reason=MISSING)

    def made(**options: Any) -> Any:
        return package.ChatOpenAI(
            model="demo", base_url=url_of(server), api_key=KEY, max_retries=0, **options
        )

    return made


def test_langchain_chat(chat: Any, expected: str) -> None:
    done = chat(max_tokens=12).invoke(SAID)
    assert done.content == expected and done.usage_metadata["output_tokens"] == 12
    assert done.response_metadata["finish_reason"] == "length"
    chunks = list(chat(max_tokens=12, stream_usage=True).stream(SAID))
    assert "".join(chunk.content for chunk in chunks) == expected
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 12
    several = chat(max_tokens=12).batch([SAID, SAID, SAID])
    assert [answer.content for answer in several] == [expected] * 3


def test_langchain_tools(chat: Any) -> None:
    messages = pytest.importorskip("langchain_core.messages", reason=MISSING)
    bound = chat().bind_tools([TOOL], tool_choice="weather")
    done = bound.invoke(SAID)
    (call,) = done.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"})
    whole: Any = None
    for chunk in bound.stream(SAID):
        whole = chunk if whole is None else whole + chunk
    assert [(call_["name"], call_["args"]) for call_ in whole.tool_calls] == [("weather", {"city": "Oslo"})]
    conversation = [messages.HumanMessage(SAID), done, messages.ToolMessage("rain", tool_call_id=call["id"])]
    assert isinstance(chat(max_tokens=2).bind_tools([TOOL]).invoke(conversation).content, str)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structure(chat: Any, method: str) -> None:
    form = chat(max_tokens=60).with_structured_output(CITY, method=method)
    assert form.invoke(SAID) == {"city": "Oslo"}


def test_langchain_responses(chat: Any, expected: str) -> None:
    """Uses the responses API."""
    model = chat(max_tokens=12, use_responses_api=True)
    assert model.invoke(SAID).text == expected
    assert "".join(chunk.text for chunk in model.stream(SAID)) == expected


def test_langchain_errors(chat: Any) -> None:
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.AuthenticationError):
        chat().bind(extra_headers={"Authorization": "Bearer wrong"}).invoke(SAID)
    with pytest.raises(openai.BadRequestError, match="top_p"):
        chat(top_p=7).invoke(SAID)
    with pytest.raises(openai.BadRequestError) as caught:
        list(chat().stream("a b " * 9000))
    assert caught.value.code == "context_length_exceeded"


# ---- embeddings and reranking ----

DOCUMENTS = ["the bear is in the tree", "red apples", "a panda eats red apples"]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    path = bert_reranker(tmp_path_factory.mktemp("reranker") / "bert.gguf")
    command = Command("-m", str(path), "-c", "64", "--api-key", KEY, "--pooling", "mean")
    yield command
    assert command.end() == 0, command.log


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = bert_reranker(tmp_path_factory.mktemp("direct") / "bert.gguf")
    with LLM(path, devices="numpy", n_ctx=64) as llm:
        yield llm


def test_langchain_embeddings(only_here: None, reranker: Command, direct: LLM) -> None:
    langchain = pytest.importorskip("langchain_openai", reason=MISSING)
    embeddings = langchain.OpenAIEmbeddings(
        model="bert", base_url=url_of(reranker), api_key=KEY, check_embedding_ctx_length=False
    )
    expected = direct.embed(DOCUMENTS, pooling="mean")
    assert np.allclose(embeddings.embed_documents(DOCUMENTS), expected, atol=1e-4)
    assert np.allclose(embeddings.embed_query(DOCUMENTS[1]), expected[1], atol=1e-4)


def test_litellm_embeddings(litellm: Any, reranker: Command, direct: LLM) -> None:
    done = litellm.embedding(model="openai/bert", input=DOCUMENTS, api_base=url_of(reranker), api_key=KEY)
    rows = [item["embedding"] for item in done.data]
    assert np.allclose(rows, direct.embed(DOCUMENTS, pooling="mean"), atol=1e-4)


def test_cohere_rerank(only_here: None, reranker: Command, direct: LLM) -> None:
    cohere = pytest.importorskip("cohere", reason=MISSING)
    expected = direct.rerank("what eats a panda ?", DOCUMENTS, top_n=2)
    url = url_of(reranker).removesuffix("/v1")
    for client in (cohere.Client(KEY, base_url=url), cohere.ClientV2(KEY, base_url=url)):
        done = client.rerank(model="bert", query="what eats a panda ?", documents=DOCUMENTS, top_n=2)
        assert [r.index for r in done.results] == [r.document for r in expected]
        assert np.allclose([r.relevance_score for r in done.results], [r.score for r in expected], atol=1e-4)


def test_langchain_rerank(only_here: None, reranker: Command, direct: LLM) -> None:
    cohere = pytest.importorskip("cohere", reason=MISSING)
    langchain = pytest.importorskip("langchain_cohere", reason=MISSING)
    client = cohere.ClientV2(KEY, base_url=url_of(reranker).removesuffix("/v1"))
    compressor = langchain.CohereRerank(client=client, model="bert", top_n=3)
    ranked = compressor.rerank(DOCUMENTS, "what eats a panda ?")
    expected = direct.rerank("what eats a panda ?", DOCUMENTS)
    assert [r["index"] for r in ranked] == [r.document for r in expected]
