"""Test embeddings of decoders: hidden states, pooling, normalisation, batches and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from device_sets import DEVICE_SETS, QUICKEST, nmse, only, product
from runners import F32
from tiny_models import Tiny, write_tiny

from vkbackend import LLM
from vkbackend.errors import GGUFError, InvalidArgument, PromptTooLong, UnsupportedModel, VkbackendError
from vkbackend.models.embeddings.pooling import normalised

LENGTHS = (1, 5, 60, 33, 2, 17, 90)
TEXTS = [np.random.default_rng(n).integers(0, 128, n).tolist() for n in LENGTHS]
POOLED = "mean", "cls", "last"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("embed") / "tiny.gguf", Tiny("qwen3", n_layer=2))


def open_tiny(path: Path, devices: list[str], **options: Any) -> LLM:
    shares = [3, 1, 2][: len(devices)]
    how = {"n_ctx": 96, "n_slots": 4, "n_ubatch": 32, **F32, **options}
    return LLM(path, devices=devices, tensor_split=shares, **how)


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with open_tiny(path, ["numpy"]) as opened:
        yield opened


def test_hidden_states_times_the_output_matrix_are_the_logits(llm: LLM, path: Path) -> None:
    [tensor] = [t for t in gguf.GGUFReader(path).tensors if t.name == "output.weight"]
    for text in TEXTS[2:4]:  # this text is longer than a step of 32 rows
        hidden = llm.embed(text, pooling="none", normalize=-1)
        assert hidden.shape == (len(text), 64)
        assert nmse(hidden @ tensor.data.T, llm.logits(text)) < 1e-12


@pytest.mark.parametrize(("devices", "pooling"), only(product(DEVICE_SETS, POOLED), "0,0-cls"))
def test_pooling_of_a_batch_on_every_device_set(
    path: Path, llm: LLM, devices: list[str], pooling: str
) -> None:
    rows = [llm.embed(text, pooling="none", normalize=-1) for text in TEXTS]
    expected = {"mean": lambda r: r.mean(axis=0), "cls": lambda r: r[0], "last": lambda r: r[-1]}[pooling]
    with open_tiny(path, devices) as on_devices:
        vectors = on_devices.embed(TEXTS, pooling=pooling, normalize=-1)
        assert vectors.dtype == np.float32 and vectors.shape == (len(TEXTS), 64)
        assert nmse(vectors, np.stack([expected(r) for r in rows])) < 1e-10
        assert nmse(on_devices.embed(TEXTS[::-1], pooling=pooling, normalize=-1)[::-1], vectors) < 1e-12


def test_many_short_texts_share_a_step(path: Path) -> None:
    texts = [[i, i + 1, i + 2] for i in range(32)]
    with open_tiny(path, ["numpy"], n_slots=32, n_ubatch=96) as many:
        many.embed(texts, pooling="last")
        n_steps = many.stats()["n_steps"]
        assert n_steps < len(texts) / 2
        first = many.embed(texts[3], pooling="last")
    with open_tiny(path, ["numpy"], n_slots=1, n_ubatch=96) as single:
        single.embed(texts, pooling="last")
        assert single.stats()["n_steps"] == len(texts)
        assert nmse(single.embed(texts[3], pooling="last"), first) < 1e-12


def test_a_common_prefix_is_computed_once(llm: LLM) -> None:
    prefix = list(range(64))
    vectors = llm.embed([[*prefix, i] for i in range(4)], pooling="last")
    cached = llm.stats()["prompt_tokens_cached"]
    assert nmse(llm.embed([*prefix, 2], pooling="last"), vectors[2]) < 1e-12
    assert llm.stats()["prompt_tokens_cached"] >= cached + 64


def test_text_and_embeddings_take_turns(llm: LLM) -> None:
    prompt = TEXTS[3]
    expected = llm.generate(prompt, 12, temperature=0).tokens, llm.embed(TEXTS, pooling="mean")
    stream = llm.stream(prompt, 12, temperature=0)
    first = next(stream).token
    vectors = llm.embed(TEXTS, pooling="mean")
    assert ([first, *(chunk.token for chunk in stream)], nmse(vectors, expected[1]) < 1e-12) == (
        expected[0],
        True,
    )


def test_asyncio_and_cancellation(llm: LLM) -> None:
    async def both() -> Any:
        return await asyncio.gather(
            llm.aembed(TEXTS, pooling="mean"), llm.agenerate(TEXTS[1], 3, temperature=0)
        )

    vectors, done = asyncio.run(both())
    assert nmse(vectors, llm.embed(TEXTS, pooling="mean")) < 1e-12 and len(done.tokens) == 3

    async def cancelled() -> None:
        task = asyncio.ensure_future(llm.aembed(TEXTS * 20, pooling="mean"))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert llm.generate(TEXTS[1], 3, temperature=0).tokens == done.tokens
    stats = llm.stats()
    assert (stats["n_running"], stats["n_waiting"]) == (0, 0)


def test_dimensions_are_cut_before_the_norm(llm: LLM) -> None:
    raw = llm.embed(TEXTS[1], pooling="mean", normalize=-1)
    cut = llm.embed(TEXTS[1], pooling="mean", dimensions=10)
    assert np.allclose(cut, raw[:10] / np.linalg.norm(raw[:10]), atol=1e-6) and cut.shape == (10,)


@pytest.mark.parametrize("kind", [-1, 0, 1, 2, 3, 400])
def test_norms(kind: int) -> None:
    vectors = np.array([[3.0, -4.0, 0.0], [0.0, 0.0, 0.0], [1e30, 1e30, -1e30]], np.float32)
    got = normalised(vectors, kind)
    assert np.isfinite(got).all() and not got[1].any()
    if kind < 0:
        assert np.array_equal(got, vectors)
    elif kind == 0:
        assert np.allclose(np.abs(got[[0, 2]]).max(axis=1), 32_760)
    else:
        assert np.allclose((np.abs(got[[0, 2]].astype(np.float64)) ** kind).sum(axis=1), 1, atol=1e-4)
    assert kind < 0 or np.allclose(got[0] / got[0, 0], vectors[0] / 3)


def test_wrong_arguments(llm: LLM) -> None:
    for texts, pooling, message in [
        ([], "mean", "texts is an empty list"),
        ([[1], []], "mean", r"texts\[1\] has no tokens"),
        ([[1], [128]], "mean", "token id 128 is out of range"),
        ([[1, 2]], None, "the file names no pooling"),
        ([[1, 2]], "max", "expected one of none, mean"),
        (7, "mean", "expected a text, token ids"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            llm.embed(texts, pooling=pooling)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="normalize"):
        llm.embed([1], pooling="mean", normalize=-2)
    with pytest.raises(InvalidArgument, match="dimensions"):
        llm.embed([1], pooling="mean", dimensions=65)
    with pytest.raises(PromptTooLong, match=r"texts\[1\] has 97 tokens, at most 96 fit"):
        llm.embed([[1], [2] * 97], pooling="mean")
    whole = llm.embed([2] * 96, pooling="last")
    assert nmse(llm.embed([2] * 97, pooling="last", truncate=True), whole) < 1e-12
    with pytest.raises(UnsupportedModel, match="no classification head"):
        llm.rerank("a", ["b"])
    with pytest.raises(UnsupportedModel):
        llm.embed("a text without a tokenizer", pooling="mean")


def test_a_wrong_pooling_type_in_a_file(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "bad.gguf", Tiny("qwen3", n_layer=1, keys={"pooling_type": 9}))
    with pytest.raises(GGUFError, match="pooling_type is 9"):
        LLM(path, devices=["numpy"])
    assert issubclass(GGUFError, VkbackendError)


def test_the_pooling_of_the_file_is_the_default(tmp_path: Path, llm: LLM) -> None:
    path = write_tiny(tmp_path / "last.gguf", Tiny("qwen3", n_layer=2, keys={"pooling_type": 3}))
    with open_tiny(path, QUICKEST) as other:
        assert nmse(other.embed(TEXTS[1]), llm.embed(TEXTS[1], pooling="last")) < 1e-10
