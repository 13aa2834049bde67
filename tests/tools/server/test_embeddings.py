"""Test embeddings over HTTP, with the openai client and llama-server's endpoints."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from device_sets import nmse
from rerankers import bert_reranker
from serving import PROCESSES, Address, one_model

from vkbackend.models.llm import LLM
from vkbackend.tools.flags.text import demo_model

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.no_vulkan

TEXTS = ["Once upon a time", "there was a girl", "a dog"]


@pytest.fixture(scope="module", params=PROCESSES)
def server(request: pytest.FixtureRequest) -> Iterator[Address]:
    with one_model("-np", "2", "--pooling", "mean", process=request.param) as address:
        yield address


@pytest.fixture(scope="module")
def client(server: Address) -> openai.OpenAI:
    import openai

    url = f"http://127.0.0.1:{server.port}/v1"
    return openai.OpenAI(base_url=url, api_key="-", max_retries=0)


@pytest.fixture(scope="module")
def direct() -> Iterator[LLM]:
    with LLM(demo_model(), devices="numpy") as llm:
        yield llm


def test_the_openai_client(client: openai.OpenAI, direct: LLM) -> None:
    expected = direct.embed(TEXTS, pooling="mean")
    answer = client.embeddings.create(model="demo", input=TEXTS)  # asks for base64
    assert [item.index for item in answer.data] == [0, 1, 2] and answer.model == "demo"
    assert nmse(np.array([item.embedding for item in answer.data], np.float32), expected) < 1e-10
    assert answer.usage.prompt_tokens == sum(len(direct.tokenize(text)) for text in TEXTS)
    floats = client.embeddings.create(model="demo", input=TEXTS[1], encoding_format="float")
    assert nmse(np.array(floats.data[0].embedding, np.float32), expected[1]) < 1e-10
    cut = client.embeddings.create(model="demo", input=TEXTS[1], dimensions=7)
    assert np.allclose(cut.data[0].embedding, direct.embed(TEXTS[1], pooling="mean", dimensions=7), atol=1e-6)


def test_tokens_are_taken_as_input(client: openai.OpenAI, direct: LLM) -> None:
    ids = [direct.tokenize(text) for text in TEXTS]
    expected = direct.embed(TEXTS, pooling="mean")
    several: Any = client.embeddings.create(model="demo", input=ids)
    assert nmse(np.array([item.embedding for item in several.data], np.float32), expected) < 1e-10
    single = client.embeddings.create(model="demo", input=ids[0])
    assert nmse(np.array(single.data[0].embedding, np.float32), expected[0]) < 1e-10


def test_base64_holds_the_floats(server: Address) -> None:
    body: dict[str, Any] = {"input": TEXTS}
    floats = server.post("/v1/embeddings", body)[1]
    encoded = server.post("/v1/embeddings", body | {"encoding_format": "base64"})[1]
    for a, b in zip(floats["data"], encoded["data"], strict=True):
        raw = np.frombuffer(base64.b64decode(b["embedding"]), "<f4")
        assert np.allclose(raw, a["embedding"], atol=1e-6)


def test_llama_server_endpoints(server: Address, direct: LLM) -> None:
    for path, field in (("/embedding", "content"), ("/embeddings", "input"), ("/embeddings", "content")):
        answer = server.post(path, {field: TEXTS, "embd_normalize": -1})[1]
        assert [item["index"] for item in answer] == [0, 1, 2]
        rows = np.array([item["embedding"][0] for item in answer], np.float32)
        assert nmse(rows, direct.embed(TEXTS, pooling="mean", normalize=-1)) < 1e-10
    single = server.post("/embedding", {"content": TEXTS[0]})[1]
    assert len(single) == 1 and abs(np.linalg.norm(single[0]["embedding"][0]) - 1) < 1e-5
    assert server.get("/props")[1]["pooling"] == "mean"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/embeddings", {}, 400, "input"),
        ("/v1/embeddings", {"input": ""}, 400, "input"),
        ("/v1/embeddings", {"input": []}, 400, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, 400, "input[1]"),
        ("/v1/embeddings", {"input": ["a", 7]}, 400, "input[1]"),
        ("/v1/embeddings", {"input": {"a": 1}}, 400, "input"),
        ("/v1/embeddings", {"input": [["a"]]}, 400, "input[0]"),
        ("/v1/embeddings", {"input": [1 << 40]}, 400, None),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, 400, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 1 << 20}, 400, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
        ("/v1/embeddings", {"input": ["a"] * 10_000}, 400, "input"),
        ("/v1/embeddings", {"input": "dog " * 9000}, 400, "input"),
        ("/embedding", {"content": ["a", "dog " * 9000]}, 400, "content[1]"),
        ("/rerank", {"query": "a"}, 400, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"]}, 501, None),
    ],
)
def test_bad_requests(
    server: Address, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    code, answer, _ = server.post(path, body)
    assert (code, answer["error"]["param"]) == (status, param), answer
    assert server.post("/v1/embeddings", {"input": "a", "truncate": True})[0] == 200


def test_truncation_is_chosen_by_the_request(server: Address) -> None:
    code, answer, _ = server.post("/v1/embeddings", {"input": "dog " * 9000, "truncate": True})
    assert code == 200 and answer["usage"]["prompt_tokens"] < 9000


# ---- an encoder that reranks ----

DOCUMENTS = ["the bear is in the tree", "red apples", "a panda eats red apples"]
QUERY = "what eats a panda ?"


@pytest.fixture(scope="module")
def reranker_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(bert_reranker(tmp_path_factory.mktemp("reranker") / "bert.gguf"))


@pytest.fixture(scope="module", params=PROCESSES)
def reranker(request: pytest.FixtureRequest, reranker_file: str) -> Iterator[Address]:
    with one_model("-m", reranker_file, "-c", "64", "--reranking", process=request.param) as address:
        yield address


def test_rerank_in_three_formats(reranker: Address, reranker_file: str) -> None:
    with LLM(reranker_file, devices="numpy", n_ctx=64) as llm:
        expected = llm.rerank(QUERY, DOCUMENTS)
        raw = llm.rerank(QUERY, DOCUMENTS, raw=True)
    body: dict[str, Any] = {"query": QUERY, "documents": DOCUMENTS, "return_documents": True}
    for path in ("/rerank", "/v1/rerank", "/v1/reranking", "/v2/rerank"):
        answer = reranker.post(path, body)[1]
        results = answer["results"]
        assert [r["index"] for r in results] == [r.document for r in expected], path
        assert np.allclose([r["relevance_score"] for r in results], [r.score for r in expected], atol=1e-4)
        assert [r["document"]["text"] for r in results] == [DOCUMENTS[r.document] for r in expected]
        assert answer["usage"]["prompt_tokens"] > 20 and answer["object"] == "list"
    objects = [{"text": text} for text in DOCUMENTS]
    answer = reranker.post("/rerank", {"query": QUERY, "documents": objects, "top_n": 1})[1]
    assert [r.keys() for r in answer["results"]] == [{"index", "relevance_score"}]
    tei = {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True, "return_text": True}
    rows = reranker.post("/rerank", tei)[1]
    assert [row["text"] for row in rows] == [DOCUMENTS[r.document] for r in raw]
    assert np.allclose([row["score"] for row in rows], [r.score for r in raw], atol=1e-3)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/rerank", {"documents": ["a"]}, 400, "query"),
        ("/rerank", {"query": "a", "documents": []}, 400, "documents"),
        ("/rerank", {"query": "a", "documents": ["b", 7]}, 400, "documents[1]"),
        ("/rerank", {"query": "a", "documents": ["b", "dog " * 99]}, 400, "documents[1]"),
        ("/rerank", {"query": "a", "documents": ["b"] * 1001}, 400, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, 400, "top_n"),
        ("/v1/embeddings", {"input": "a"}, 501, None),
        ("/v1/completions", {"prompt": "a"}, 501, None),
        ("/completion", {"prompt": "a"}, 501, None),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, 501, None),
    ],
)
def test_what_the_reranker_refuses(
    reranker: Address, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    code, answer, _ = reranker.post(path, body)
    assert (code, answer["error"]["param"]) == (status, param), answer
    assert reranker.post("/rerank", {"query": "a", "documents": ["b"]})[0] == 200
