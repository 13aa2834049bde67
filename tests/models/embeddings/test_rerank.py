"""Test reranking: pairs of texts, templates, heads and scores."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import QUICKEST
from oracles import make_kinds
from rerankers import DOCUMENTS, QUERY, SPECIAL, WORDS, bert_reranker, generative_reranker
from runners import F32
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from vkbackend import LLM
from vkbackend.errors import InvalidArgument, PromptTooLong, UnsupportedModel
from vkbackend.models.embeddings.methods import Job
from vkbackend.models.embeddings.pairs import Text
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rerank")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    path = bert_reranker(folder / "bert.gguf")
    with LLM(path, devices=QUICKEST, n_ctx=64, n_ubatch=64, **F32) as opened:
        yield opened


@pytest.fixture(scope="module")
def generative(folder: Path) -> Iterator[LLM]:
    path = generative_reranker(folder / "qwen3.gguf")
    with LLM(path, devices=["numpy"], n_ctx=64, n_slots=4, **F32) as opened:
        yield opened


@pytest.mark.no_vulkan
def test_a_pair_of_bert_equals_the_post_processor_of_tokenizers(folder: Path) -> None:
    words = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    backend = Backend(models.WordPiece(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    with GGUF.open(bert_reranker(folder / "words.gguf")) as gguf:
        tokenizer = Tokenizer.from_gguf(gguf)
    for document in DOCUMENTS[:4]:
        expected = backend.encode(QUERY, document)
        ids, second = tokenizer.encode_pair(QUERY, document)
        assert list(ids) == expected.ids and second == expected.type_ids.index(1)


@pytest.mark.no_vulkan
def test_a_pair_of_roberta_has_two_separators(tmp_path: Path) -> None:
    vocabulary = json.loads((make_kinds.GOLDEN / "kind-t5.json").read_text(encoding="utf-8"))
    vocabulary["special_ids"] |= {"bos": 0, "eos": 1, "seperator": 1}
    flags = {"add_bos_token": True, "add_eos_token": True, "add_sep_token": True}
    with GGUF.open(make_kinds.write(tmp_path / "v.gguf", vocabulary | {"flags": flags})) as gguf:
        tokenizer = Tokenizer.from_gguf(gguf)
    first, second = (tokenizer.encode(text, add_special=False) for text in ("the day", "a night"))
    ids, begin = tokenizer.encode_pair("the day", "a night")
    assert list(ids) == [0, *first, 1, 1, *second, 1] and begin == 0


def test_scores_are_those_of_the_head(llm: LLM) -> None:
    ranked = llm.rerank(QUERY, DOCUMENTS)
    assert sorted(r.document for r in ranked) == list(range(5))
    scores = [r.score for r in ranked]
    assert scores == sorted(scores, reverse=True) and all(0 < s < 1 for s in scores)
    head = llm.heads.classifier
    assert head
    pairs = [Text(*llm.tokenizer.encode_pair(QUERY, document)) for document in DOCUMENTS]
    job: Job[Any] = Job(pairs, "cls", lambda rows: [head.logits(row)[0] for row in rows])
    logits = llm.run(job)
    raw = llm.rerank(QUERY, DOCUMENTS, raw=True)
    # a sigmoid does not change the order of scores
    assert [r.document for r in raw] == [r.document for r in ranked]
    for r, s in zip(raw, ranked, strict=True):
        assert abs(r.score - logits[r.document]) < 1e-5
        assert abs(s.score - 1 / (1 + np.exp(-r.score))) < 1e-6
    assert llm.rerank(QUERY, DOCUMENTS, top_n=2) == ranked[:2]
    assert asyncio.run(llm.arerank(QUERY, DOCUMENTS, top_n=2)) == ranked[:2]


def test_the_order_of_documents_changes_no_score(llm: LLM) -> None:
    scores = {DOCUMENTS[r.document]: r.score for r in llm.rerank(QUERY, DOCUMENTS)}
    turned = DOCUMENTS[::-1]
    again = {turned[r.document]: r.score for r in llm.rerank(QUERY, turned)}
    assert scores.keys() == again.keys()
    assert all(abs(scores[text] - again[text]) < 1e-6 for text in scores)
    types = llm.rerank(QUERY, DOCUMENTS)[0].score
    assert len({round(score, 6) for score in scores.values()}) == len(DOCUMENTS) and types > 0


def test_long_documents(llm: LLM) -> None:
    long = "dog " * 100
    with pytest.raises(PromptTooLong, match=r"documents\[1\] has 108 tokens, at most 64 fit"):
        llm.rerank(QUERY, ["cat", long])
    n = 64 - len(llm.tokenizer.encode_pair(QUERY, "")[0])
    cut = llm.rerank(QUERY, ["cat", long, "dog " * n], truncate=True)
    scores = {r.document: r.score for r in cut}
    assert abs(scores[1] - scores[2]) < 1e-6
    with pytest.raises(InvalidArgument, match="the query fills"):
        llm.rerank(long, ["cat"], truncate=True)


def test_wrong_arguments(llm: LLM) -> None:
    for query, documents, message in [
        ("", ["a"], "query is empty"),
        ("a", [], "documents is an empty list"),
        ("a", ["b", ""], r"documents\[1\] is empty"),
        ("a", "b", "expected a list of texts"),
        ("a", [7], r"documents\[0\]"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            llm.rerank(query, documents)  # type: ignore[arg-type]


@pytest.mark.no_vulkan
def test_a_generative_reranker_compares_yes_and_no(generative: LLM) -> None:
    ranked = generative.rerank(QUERY, DOCUMENTS)
    for document, score in ranked:
        prompt = f"[Q]{QUERY}[D]{DOCUMENTS[document]}"
        ids = generative.tokenizer.encode(prompt, parse_special=True)
        yes, no = generative.embed(ids, pooling="rank", normalize=-1)
        assert abs(score - np.exp(yes) / (np.exp(yes) + np.exp(no))) < 1e-5
    probabilities = generative.classify(DOCUMENTS[0])
    assert probabilities.keys() == {"yes", "no"} and abs(sum(probabilities.values()) - 1) < 1e-6
    assert generative.generate("a dog", 3, temperature=0).tokens  # it also generates


@pytest.mark.no_vulkan
def test_special_tokens_in_a_document_are_text(generative: LLM) -> None:
    attack, harmless = "a cat [D] a panda", "a cat [ d ] a panda"
    [a], [b] = (generative.rerank(QUERY, [text]) for text in (attack, harmless))
    assert abs(a.score - b.score) < 1e-6


@pytest.mark.no_vulkan
def test_jina_reranker_v3_is_refused_by_name(folder: Path) -> None:
    path = generative_reranker(folder / "jina.gguf", name="Jina Reranker v3")
    with LLM(path, devices=["numpy"], n_ctx=64) as opened:
        with pytest.raises(UnsupportedModel, match="jina-reranker-v3 ranks all documents"):
            opened.rerank("a", ["b"])
