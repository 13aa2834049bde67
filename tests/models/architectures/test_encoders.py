"""Encoders reproduce golden hidden states of transformers and llama.cpp, and of float64 references."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import encoder_float64
import numpy as np
import pytest
from device_sets import DEVICE_SETS, QUICKEST, covering, nmse, only, product, wide
from oracles.encoders import BUILDERS, build
from oracles.fixture import PROMPT, write
from places import GOLDEN
from rerankers import bert_reranker
from runners import F32

from vkbackend import LLM
from vkbackend.errors import PromptTooLong, UnsupportedModel
from vkbackend.models.architectures.registry import ENCODERS
from vkbackend.models.embeddings.heads import probabilities
from vkbackend.models.placement import encoders, settled
from vkbackend.tools.cli import main

N_FIRST = 20  # as in make_encoders.py
# llama.cpp's GELU has errors of 1e-4, and transformers supports none of these families.
ONLY_LLAMA_CPP = "nomic-bert-moe", "jina-bert-v2"
FLOAT64 = (*ONLY_LLAMA_CPP, "jina-bert-v3")
SHARES = {1: [1], 2: [3, 1], 3: [1, 2, 1]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


@pytest.fixture(scope="module")
def golden() -> Iterator[Any]:
    with np.load(GOLDEN / "encoders.npz") as arrays:
        yield dict(arrays)


def open_encoder(models: Path, name: str, devices: list[str], **options: Any) -> LLM:
    path = models / f"{name}.gguf"
    if not path.exists():
        write(build(name), path)
    how = {"n_ctx": 96, "n_ubatch": 64, "tensor_split": SHARES[len(devices)], **F32, **options}
    return LLM(path, devices=devices, **how)


def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (settled, encoders):
        monkeypatch.setattr(module, "most_rows", lambda model: 16)


def hidden(llm: LLM, ids: Any) -> Any:
    rows = llm.embed(ids, pooling="none", normalize=-1)
    assert not llm.heads.dense
    return rows


def test_every_encoder_has_a_fixture() -> None:
    assert {name for name in BUILDERS if "+" not in name} == set(ENCODERS)


@pytest.mark.no_vulkan
@pytest.mark.parametrize("name", only(BUILDERS, *({*BUILDERS} - {*FLOAT64, "bert+roberta"})))
def test_golden_states_on_numpy(models: Path, golden: Any, name: str) -> None:
    texts = [PROMPT[:3], PROMPT, PROMPT[5:30], [PROMPT[0]], PROMPT]
    with open_encoder(models, name, ["numpy"] * 2) as llm:
        heads = llm.heads.embedding
        several = llm.embed(texts, pooling="none", normalize=-1)
        alone = llm.embed(texts[2], pooling="none", normalize=-1)
    bound = 1e-6 if name in ONLY_LLAMA_CPP else 1e-9
    for rows in (several[1], several[4]):
        assert nmse(rows, heads(golden[name])) < bound
    # texts in one step must not attend to each other
    assert nmse(several[2], alone) < 1e-11 and nmse(several[1][:25], several[2]) > 1e-3


# a model of each form of block, one of them with windows and one with experts
FORMS = ("bert", "modern-bert", "nomic-bert-moe")


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        wide(param) if param.values[0] not in FORMS or "1" in param.values[1] else param
        for param in covering(list(BUILDERS), DEVICE_SETS)
    ],
)
def test_golden_states_on_vulkan(models: Path, golden: Any, name: str, devices: list[str]) -> None:
    with open_encoder(models, name, devices) as llm:
        rows = llm.embed([PROMPT[:7], PROMPT], pooling="none", normalize=-1)[1]
        expected = llm.heads.embedding(golden[name])
    assert nmse(rows, expected) < (1e-6 if name in ONLY_LLAMA_CPP else 1e-9)


@pytest.mark.no_vulkan
@pytest.mark.parametrize("name", FLOAT64)
def test_float64_references(models: Path, golden: Any, name: str) -> None:
    expected = encoder_float64.hidden(build(name))
    assert nmse(golden[name], expected) < 1e-6  # the float64 reference agrees with llama.cpp or transformers
    with open_encoder(models, name, ["numpy"] * 3) as llm:
        assert nmse(hidden(llm, PROMPT), expected) < 1e-11


@pytest.mark.no_vulkan
def test_the_second_text_of_a_pair_has_another_type(models: Path, golden: Any) -> None:
    from vkbackend.models.embeddings.methods import Job
    from vkbackend.models.embeddings.pairs import Text

    with open_encoder(models, "bert", ["numpy"]) as llm:
        job: Job[Any] = Job([Text(tuple(PROMPT)), Text(tuple(PROMPT), N_FIRST)], "none", lambda rows: rows)
        plain, pair = llm.run(job)
    assert nmse(pair, golden["bert pair"]) < 1e-9 and nmse(plain, golden["bert"]) < 1e-9
    assert nmse(pair, plain) > 1e-3


@pytest.mark.no_vulkan
@pytest.mark.parametrize("name", ["bert+roberta", "modern-bert"])
def test_classification_heads(models: Path, golden: Any, name: str) -> None:
    expected = golden[f"{name} logits"]
    with open_encoder(models, name, ["numpy"]) as llm:
        assert nmse(llm.embed(PROMPT), expected) < 1e-9  # the file sets the pooling type "rank"
        [(label, share)] = llm.classify(PROMPT).items()
        assert label == "LABEL_0" and abs(share - 1 / (1 + np.exp(-expected[0]))) < 1e-6


@pytest.mark.no_vulkan
def test_dense_layers_follow_the_mean(models: Path, golden: Any) -> None:
    m = build("gemma-embedding")
    mean = golden[m.name].astype(np.float64).mean(axis=0)
    expected = m["dense_3.weight"].astype(np.float64) @ (m["dense_2.weight"].astype(np.float64) @ mean)
    with open_encoder(models, m.name, ["numpy"]) as llm:
        assert nmse(llm.embed(PROMPT), expected / np.linalg.norm(expected)) < 1e-9


ON_NUMPY = pytest.param(["numpy"] * 2, id="numpy,numpy", marks=pytest.mark.no_vulkan)


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        *only(product(list(BUILDERS), [ON_NUMPY]), "bert-numpy,numpy"),
        *map(wide, covering(list(BUILDERS), DEVICE_SETS)),
    ],
)
def test_texts_longer_than_a_step_are_computed_in_stages(
    models: Path, golden: Any, name: str, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few_rows(monkeypatch)
    expected = golden[name].astype(np.float64)
    with open_encoder(models, name, devices, n_ctx=64, n_ubatch=16) as llm:
        bound, head = 1e-6 if name in ONLY_LLAMA_CPP else 1e-9, llm.heads.embedding
        assert llm.n_text == 64
        # steps of short texts alternate with steps that compute part of a long text
        texts = [PROMPT[:9], PROMPT, PROMPT[:16], PROMPT]
        rows = llm.embed(texts, pooling="none", normalize=-1)
        assert max(nmse(row, head(expected)) for row in (rows[1], rows[3])) < bound
        alone = llm.embed(PROMPT[:16], pooling="none", normalize=-1)
        assert nmse(rows[2], alone) < 1e-11
        for pooling, row in (("mean", expected.mean(axis=0)), ("cls", expected[0]), ("last", expected[-1])):
            assert nmse(llm.embed(PROMPT, pooling=pooling, normalize=-1), head(row)) < bound
        with pytest.raises(PromptTooLong):
            llm.embed([1] * 65)


def test_a_cancelled_text_in_stages_frees_its_slot(
    models: Path, golden: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_rows(monkeypatch)
    with open_encoder(models, "bert", ["numpy"], n_ctx=64, n_ubatch=16) as llm:

        async def cancelled() -> None:
            task = asyncio.ensure_future(llm.aembed([PROMPT] * 40, pooling="mean"))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(cancelled())
        assert nmse(llm.embed(PROMPT, pooling="none", normalize=-1), golden["bert"]) < 1e-9
        stats = llm.stats()
        assert (stats["n_running"], stats["n_waiting"]) == (0, 0)


def test_what_an_encoder_refuses(models: Path) -> None:
    with open_encoder(models, "bert", QUICKEST, n_ctx=32, n_ubatch=8) as llm:
        assert llm.is_encoder and llm.n_text == 32
        for call in (llm.generate, llm.logits):
            with pytest.raises(UnsupportedModel, match="this model is an encoder"):
                call(PROMPT[:4])
        with pytest.raises(PromptTooLong, match="texts has 48 tokens, at most 32 fit"):
            llm.embed(PROMPT)
        cut = llm.embed(PROMPT, truncate=True)
        assert nmse(cut, llm.embed(PROMPT[:32])) < 1e-12
    with pytest.raises(UnsupportedModel, match="exceeds the model's 96 position embeddings"):
        open_encoder(models, "bert", ["numpy"], n_ctx=97)


@pytest.mark.no_vulkan
def test_attention_may_be_chosen(models: Path) -> None:
    with open_encoder(models, "llama+encoder", ["numpy"], attention="causal") as causal:
        assert not causal.is_encoder
        rows = causal.embed([PROMPT, PROMPT[:9]], pooling="none", normalize=-1)
        assert nmse(rows[0][:9], rows[1]) < 1e-11  # later tokens change nothing
    with open_encoder(models, "llama+encoder", ["numpy"], attention="non-causal") as both:
        assert both.is_encoder
        rows = both.embed([PROMPT, PROMPT[:9]], pooling="none", normalize=-1)
        assert nmse(rows[0][:9], rows[1]) > 1e-3


def test_probabilities() -> None:
    assert np.allclose(probabilities(np.array([0.0])), [0.5])
    assert np.allclose(probabilities(np.array([1e4])), [1.0])
    assert np.allclose(probabilities(np.array([1e4, 0.0, -1e4])), [1, 0, 0])


def test_commands_refuse_an_encoder(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(bert_reranker(models / "words.gguf"))
    for words in (("generate", "-p", "a", "-c", "64"), ("bench", "-p", "8", "-n", "1", "-r", "1")):
        assert main([*words, "-m", path, "-dev", "numpy"]) == 2
        assert "this model is an encoder" in capsys.readouterr().err.splitlines()[-1]
