"""Embeddings and scores of texts equal the results of Sentence Transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_sets import nmse, one_driver, wide
from oracles.encoders import build
from oracles.fixture import write
from places import GOLDEN
from rerankers import DOCUMENTS, QUERY, add_words, bert_reranker
from runners import F32

from vkbackend import LLM

OPTIONS: dict[str, Any] = {"n_ctx": 64, "n_ubatch": 64, "n_slots": 4, **F32}
# NMSE of f32; PyTorch adds in another order
BOUND = 1e-10
DEVICES = [
    pytest.param(["numpy"] * 2, id="numpy,numpy", marks=pytest.mark.no_vulkan),
    wide(pytest.param(["0", "0"], marks=one_driver, id="0,0")),
]


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "sentences.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("name", ["bert", "gemma-embedding"])
def test_embeddings(golden: dict[str, np.ndarray], tmp_path: Path, name: str, devices: list[str]) -> None:
    """gemma-embedding has two dense layers after the pooling."""
    m = build(name)
    add_words(m)
    with LLM(write(m, tmp_path / "m.gguf"), devices=devices, **OPTIONS) as llm:
        for pooling in ("mean", "cls"):
            vectors = llm.embed([QUERY, *DOCUMENTS], pooling=pooling)
            assert nmse(vectors, golden[f"{name} {pooling}"]) < BOUND


@pytest.mark.parametrize("devices", DEVICES)
def test_scores_of_a_cross_encoder(golden: dict[str, np.ndarray], tmp_path: Path, devices: list[str]) -> None:
    with LLM(bert_reranker(tmp_path / "m.gguf"), devices=devices, **OPTIONS) as llm:
        scores = {ranked.document: ranked.score for ranked in llm.rerank(QUERY, DOCUMENTS)}
    assert nmse(np.array([scores[i] for i in range(len(DOCUMENTS))]), golden["bert scores"]) < BOUND
