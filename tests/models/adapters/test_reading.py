"""Adapter files, and files that are refused with one typed error before anything is loaded. This test file is
long, because it damages the same adapters in every format."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import ALPHA, Pairs, random_pairs, write_adapter, write_peft
from fuzz.adapters import Adapters
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.fixture import PROMPT, Fixture, write
from oracles.fixtures import build
from random_cases import examples
from runners import F32, load_runner

from vkbackend import LLM
from vkbackend.errors import (
    AdapterError,
    GGUFError,
    InvalidArgument,
    PlanError,
    UnsupportedModel,
    VkbackendError,
)
from vkbackend.models.adapters.gguf_adapter import read_gguf_adapter
from vkbackend.models.adapters.peft import read_peft_adapter
from vkbackend.models.adapters.peft_config import read_peft_config
from vkbackend.models.adapters.stacks import low_rank_specs
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.engine.runner.loading import Loading
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.placement import traced_steps
from vkbackend.step import Run

pytestmark = pytest.mark.no_vulkan
MODULES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


@pytest.fixture(scope="module")
def fixture() -> Fixture:
    return build("llama")


@pytest.fixture(scope="module")
def model(fixture: Fixture, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(fixture, tmp_path_factory.mktemp("model") / "model.gguf")


@pytest.fixture(scope="module")
def pairs(fixture: Fixture) -> Pairs:
    return random_pairs(fixture, 4)


def halves(name: str, b: np.ndarray, head_dim: int) -> np.ndarray:
    """Undo the converter's row order for q and k."""
    if "attn_q." not in name and "attn_k." not in name:
        return b
    return b.reshape(-1, head_dim // 2, 2, b.shape[1]).swapaxes(1, 2).reshape(b.shape)


def as_peft(fixture: Fixture, pairs: Pairs) -> dict[str, np.ndarray]:
    tensors = {}
    for name, (a, b) in pairs.items():
        _, il, matrix, _ = name.split(".")
        module = f"model.layers.{il}.{MODULES[matrix]}"
        tensors[f"{module}.lora_A"] = a
        tensors[f"{module}.lora_B"] = halves(name, b, fixture.keys["attention.key_length"])
    return tensors


def logits(model: Path, adapter: Path) -> np.ndarray:
    runner = load_runner(model, devices=["numpy"], lora=[adapter], n_ctx=32, n_ubatch=32, **F32)
    try:
        return runner.step(PROMPT[:8], [Run(0, 0, 8, 0, adapters=((0, 1.0),))], range(8)).copy()
    finally:
        runner.close()


def test_a_peft_folder_is_the_converted_file(
    model: Path, fixture: Fixture, pairs: Pairs, tmp_path: Path
) -> None:
    converted = write_adapter(tmp_path / "a.gguf", fixture.arch, pairs)
    folder = write_peft(tmp_path / "peft", as_peft(fixture, pairs))
    assert np.array_equal(logits(model, folder), logits(model, converted))


@pytest.mark.parametrize(
    ("config", "factors"),
    [
        ({}, {4: ALPHA / 4}),
        ({"use_rslora": True}, {4: ALPHA / 2}),
        ({"alpha_pattern": {"q_proj": 2.0, r"layers\.1\..*": 3.0}}, {"q": 0.5, "1": 0.75, 4: ALPHA / 4}),
        ({"alpha_pattern": {"^model.layers.1.self_attn.q_proj": 2.0}}, {"1q": 0.5, 4: ALPHA / 4}),
    ],
)
def test_the_factor_of_each_pair(
    fixture: Fixture, pairs: Pairs, tmp_path: Path, config: dict[str, Any], factors: Mapping[Any, float]
) -> None:
    folder = write_peft(tmp_path / "a", as_peft(fixture, pairs), config)
    adapter = read_peft_adapter(
        str(folder), "llama", fixture.n_layer, 0, fixture.keys["attention.key_length"]
    )
    for name, pair in adapter.pairs.items():
        _, il, matrix, _ = name.split(".")
        keys = (f"{il}{matrix[5:]}", matrix[5:] if matrix == "attn_q" else "", il, 4)
        assert pair.factor == next(factors[key] for key in keys if key in factors), name


@pytest.mark.parametrize(("alpha", "factor"), [(None, 1.0), (0.0, 1.0), (6.0, 1.5)])
def test_alpha_of_a_gguf_file(pairs: Pairs, tmp_path: Path, alpha: float | None, factor: float) -> None:
    """Without alpha there is no division by the rank, as in llama.cpp."""
    adapter = read_gguf_adapter(str(write_adapter(tmp_path / "a.gguf", "llama", pairs, alpha)), "llama")
    assert {pair.factor for pair in adapter.pairs.values()} == {factor}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_stacks_keep_the_type_of_the_files_if_that_is_exact(
    model: Path, pairs: Pairs, tmp_path: Path, dtype: Any
) -> None:
    files = [
        write_adapter(tmp_path / f"{i}.gguf", "llama", pairs, alpha, dtype) for i, alpha in enumerate((8, 6))
    ]
    adapters = [read_gguf_adapter(str(path), "llama") for path in files]
    with GGUF.open(model) as gguf:
        specs = load_model(gguf).weights()
    for chosen, exact in ((adapters[:1], True), (adapters, False)):  # 6 / 4 is not a power of two
        added = {spec.name: spec for spec in low_rank_specs(chosen, specs)}
        a, b = added["blk.0.attn_q,attn_k,attn_v.lora_a"], added["blk.0.attn_q.weight.lora_b"]
        assert a.dtype == ("f16" if dtype == np.float16 else "f32")
        assert b.dtype == ("f16" if dtype == np.float16 and exact else "f32")
        n = len(chosen)
        assert a.shape == (3 * 4 * n, 64) and b.shape[1] == 4 * n
        assert {name for name in added if "starts" in name} == {
            "lora_starts.4",
            "lora_starts.8",
            "lora_starts.12",
        }


def test_the_digest_is_that_of_the_content(fixture: Fixture, pairs: Pairs, tmp_path: Path) -> None:
    def digest(name: str, pairs: Pairs, alpha: float = ALPHA) -> str:
        return read_gguf_adapter(str(write_adapter(tmp_path / name, "llama", pairs, alpha)), "llama").digest

    changed = {name: (a, b + (name.startswith("blk.1.attn_q"))) for name, (a, b) in pairs.items()}
    assert digest("a", pairs) == digest("b", pairs)
    assert len({digest("a", pairs), digest("b", changed), digest("c", pairs, 4.0)}) == 3


# ---- bad files ----


@pytest.fixture(scope="module")
def damage(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("damage"))


def with_pair(name: str, a: Any, b: Any) -> Callable[[Pairs], Pairs]:
    return lambda pairs: {**pairs, name: (np.asarray(a, np.float32), np.asarray(b, np.float32))}


Q = "blk.0.attn_q.weight"
BAD_PAIRS: dict[str, tuple[Callable[[Pairs], Pairs], type[VkbackendError], str]] = {
    "unknown tensor": (with_pair("blk.0.nothing.weight", [[1] * 64], [[1]]), AdapterError, "no tensor"),
    "layer": (with_pair("blk.9.attn_q.weight", [[1] * 64], [[1]] * 64), AdapterError, "no tensor"),
    "inputs": (with_pair(Q, np.ones((4, 32)), np.ones((64, 4))), AdapterError, "another base model"),
    "outputs": (with_pair(Q, np.ones((4, 64)), np.ones((32, 4))), AdapterError, "another base model"),
    "ranks": (with_pair(Q, np.ones((4, 64)), np.ones((64, 3))), AdapterError, "expected \\(rank"),
    "vectors": (with_pair(Q, np.ones(64), np.ones(64)), AdapterError, "expected \\(rank"),
    "stack": (with_pair(Q, np.ones((2, 4, 64)), np.ones((2, 64, 4))), AdapterError, "base model"),
    "rank 0": (with_pair(Q, np.ones((0, 64)), np.ones((64, 0))), GGUFError, "impossible shape"),
    "NaN": (with_pair(Q, np.full((4, 64), np.nan), np.ones((64, 4))), AdapterError, "NaN"),
    "infinity": (with_pair(Q, np.ones((4, 64)), np.full((64, 4), np.inf)), AdapterError, "infinity"),
    "embedding": (
        with_pair("token_embd.weight", np.ones((4, 64)), np.ones((128, 4))), UnsupportedModel, "embeddings"
    ),
    "norm": (with_pair("blk.0.attn_norm.weight", [[1.0]], [[1.0]] * 64), UnsupportedModel, "norms"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_PAIRS)
def test_a_bad_gguf_file_is_refused(
    model: Path, pairs: Pairs, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loading, "open", None)  # the adapter is refused before a device is opened
    change, error, words = BAD_PAIRS[case]
    path = write_adapter(tmp_path / "bad.gguf", "llama", change(pairs))
    with pytest.raises(error, match=words) as raised:
        LLM(model, devices=["numpy"], lora=[path])
    assert "bad.gguf" in str(raised.value)


def test_other_files_are_refused(model: Path, pairs: Pairs, tmp_path: Path) -> None:
    def refused(path: Path, error: type[VkbackendError], words: str) -> None:
        with pytest.raises(error, match=words):
            LLM(model, devices=["numpy"], lora=[path])

    refused(model, AdapterError, "general.type")
    refused(write_adapter(tmp_path / "a", "qwen3", pairs), AdapterError, "'qwen3' models")
    refused(write_adapter(tmp_path / "b", "llama", pairs, kind="ia3"), AdapterError, "adapter.type")
    refused(write_adapter(tmp_path / "c", "llama", pairs, alpha=1e30), AdapterError, "alpha / rank")
    refused(write_adapter(tmp_path / "d", "llama", {}), AdapterError, "no tensors")
    refused(tmp_path / "missing.gguf", GGUFError, "missing.gguf")
    raw = write_adapter(tmp_path / "e", "llama", pairs).read_bytes()
    (tmp_path / "half").write_bytes(raw.replace(b"blk.0.attn_q.weight.lora_b", b"blk.0.attn_q.weight.lora_x"))
    refused(tmp_path / "half", UnsupportedModel, "half of a low-rank pair")
    (tmp_path / "short").write_bytes(raw[:-100])
    refused(tmp_path / "short", GGUFError, "short")


def test_adapters_beyond_one_binding_are_refused(
    model: Path, pairs: Pairs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The A matrices of two rank-4 adapters have 2,048 bytes together, one more than fits into a binding
    here."""
    path = write_adapter(tmp_path / "a.gguf", "llama", {Q: pairs[Q]})
    monkeypatch.setattr(traced_steps, "piece_nbytes", lambda device: 2047)
    with pytest.raises(PlanError, match=r"attn_q.weight.lora_a exceeds one binding"):
        LLM(model, devices=["numpy"], lora={"a": path, "b": path})


def test_an_adapter_of_the_router_is_refused(tmp_path: Path) -> None:
    """The router is exact and has no adapters, so the file could be applied only in part."""
    fixture = build("qwen3moe")
    model = write(fixture, tmp_path / "m.gguf")
    path = write_adapter(
        tmp_path / "a.gguf", fixture.arch, random_pairs(fixture, 2, r"blk\.\d+\.ffn_gate_inp\.weight")
    )
    with pytest.raises(UnsupportedModel, match="ffn_gate_inp"):
        LLM(model, devices=["numpy"], lora=[path])


BAD_CONFIGS: list[tuple[Any, type[VkbackendError], str]] = [
    ({"use_dora": True}, UnsupportedModel, "use_dora"),
    ({"bias": "lora_only"}, UnsupportedModel, "bias"),
    ({"modules_to_save": ["lm_head"]}, UnsupportedModel, "modules_to_save"),
    ({"target_parameters": ["mlp.experts.down_proj"]}, UnsupportedModel, "target_parameters"),
    ({"peft_type": "IA3"}, UnsupportedModel, "peft_type"),
    ({"lora_alpha": None}, AdapterError, "lora_alpha"),
    ({"lora_alpha": "8"}, AdapterError, "lora_alpha"),
    ({"lora_alpha": 1e31}, AdapterError, "lora_alpha"),
    ({"lora_alpha": 1e29}, AdapterError, "alpha / rank"),
    ({"alpha_pattern": {"(a+)+$": 1}}, UnsupportedModel, "alpha_pattern"),
    ({"alpha_pattern": [1]}, AdapterError, "alpha_pattern"),
    ({"alora_invocation_tokens": ["x"]}, AdapterError, "alora_invocation_tokens"),
]


@pytest.mark.parametrize(("config", "error", "words"), BAD_CONFIGS)
def test_a_bad_peft_configuration_is_refused(
    model: Path, fixture: Fixture, pairs: Pairs, tmp_path: Path,
    config: dict[str, Any], error: type[VkbackendError], words: str,
) -> None:  # fmt: skip
    folder = write_peft(tmp_path / "a", as_peft(fixture, pairs), config)
    with pytest.raises(error, match=words):
        LLM(model, devices=["numpy"], lora=[folder])


def test_bad_peft_tensors_are_refused(model: Path, fixture: Fixture, pairs: Pairs, tmp_path: Path) -> None:
    good, q = as_peft(fixture, pairs), "model.layers.0.self_attn.q_proj"

    def refused(tensors: Mapping[str, np.ndarray], error: type[VkbackendError], words: str) -> None:
        folder = write_peft(tmp_path / f"{len(list(tmp_path.iterdir()))}", tensors)
        with pytest.raises(error, match=words):
            LLM(model, devices=["numpy"], lora=[folder])

    refused({**good, f"{q}.lora_magnitude_vector": np.ones(4, np.float32)}, UnsupportedModel, "magnitude")
    refused(
        {**good, "model.vision.q_proj.lora_A": np.ones((4, 64), np.float32)},
        AdapterError,
        "lacks lora_B|vision",
    )
    refused({k: v for k, v in good.items() if k != f"{q}.lora_B"}, AdapterError, "lacks lora_B")
    refused({**good, f"{q}.lora_A": good[f"{q}.lora_A"].astype(np.float64)}, UnsupportedModel, "F64")
    refused({**good, f"{q}.lora_A": np.zeros((0, 64), np.float32)}, AdapterError, "rank|expected")
    refused({**good, f"{q}.lora_A": np.full((4, 64), np.nan, np.float32)}, AdapterError, "NaN")
    refused({**good, f"{q}.lora_A": np.ones((4, 32), np.float32)}, AdapterError, "another base model")
    refused({**good, f"{q}.other.lora_A": good[f"{q}.lora_A"]}, AdapterError, "lacks|not a module")
    refused({}, AdapterError, "no tensors")


def safetensors(header: Any, data: bytes = b"") -> bytes:
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


TENSOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "header"),
    "the header's length": ((1 << 62).to_bytes(8, "little"), "header"),
    "no JSON": (b"\x02\0\0\0\0\0\0\0xx", "header"),
    "cut": (safetensors({TENSOR: {"dtype": "F32", "shape": [4, 64], "data_offsets": [0, 1024]}}), "whole"),
    "offsets": (
        safetensors({TENSOR: {"dtype": "F32", "shape": [1, 1], "data_offsets": [8, 12]}}, bytes(12)), "offset"
    ),
    "an enormous shape": (
        safetensors({TENSOR: {"dtype": "F32", "shape": [1 << 40] * 2, "data_offsets": [0, 4]}}, bytes(4)),
        "overflow",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_safetensors(tmp_path: Path, case: str) -> None:
    folder = write_peft(tmp_path / "a", {"x": np.ones(1, np.float32)})
    raw, words = DAMAGED[case]
    (folder / "adapter_model.safetensors").write_bytes(raw)
    with pytest.raises(AdapterError, match=words):
        read_peft_adapter(str(folder), "llama", 2, 0, 16)


@pytest.mark.timeout(60)  # reading a pipe would never end
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_files_that_are_not_regular(tmp_path: Path, name: str) -> None:
    folder = write_peft(tmp_path / "a", {"x": np.ones(1, np.float32)})
    (folder / name).unlink()
    with pytest.raises(AdapterError, match=f"{name} does not exist"):
        read_peft_adapter(str(folder), "llama", 2, 0, 16)
    os.mkfifo(folder / name)
    with pytest.raises(AdapterError, match="not a regular file"):
        read_peft_adapter(str(folder), "llama", 2, 0, 16)
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(AdapterError, match="not a regular file"):
        read_peft_adapter(str(folder), "llama", 2, 0, 16)


def test_a_pickle_is_not_read(model: Path, tmp_path: Path) -> None:
    folder = write_peft(tmp_path / "a", {"x": np.ones(1, np.float32)})
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(UnsupportedModel, match="pickle"):
        LLM(model, devices=["numpy"], lora=[folder])
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(AdapterError, match="safetensors"):
        LLM(model, devices=["numpy"], lora=[folder])


@pytest.mark.parametrize("text", ["", "[]", "{", '"a"', "[" * 100_000, "\0", "{}", '{"peft_type": 1}'])
def test_a_configuration_that_is_not_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text, encoding="utf-8")
    with pytest.raises((AdapterError, UnsupportedModel)):
        read_peft_config(tmp_path / "c.json")


@settings(max_examples=examples(120), deadline=None)
@given(st.integers(0, 1 << 32))
def test_random_damage_gives_a_typed_error_or_an_adapter(damage: Adapters, seed: int) -> None:
    assert damage.check(damage.make(random.Random(seed))) in ("accepted", "refused")


# ---- arguments ----


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (3, "expected files"),
        ([("a", float("nan"))], "scale"),
        ([("a", 1e9)], "scale"),
        ([3], "expected the path"),
        (["x/a.gguf", "y/a.gguf"], "two adapters"),
        ({"": "a"}, "name"),
        ([f"{i}.gguf" for i in range(65)], "at most 64"),
    ],
)
def test_bad_arguments(model: Path, lora: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        LLM(model, devices=["numpy"], lora=lora)


def test_names(model: Path, fixture: Fixture, pairs: Pairs, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "sql.gguf", "llama", {Q: pairs[Q]})
    with LLM(model, devices=["numpy"], lora=[path]) as llm:
        [adapter] = llm.adapters
        assert (adapter["name"], adapter["scale"], adapter["rank"]) == ("sql", 1.0, 4)
    with LLM(model, devices=["numpy"], lora={"x": (path, 0.5), "y": path}) as llm:
        assert [(a["id"], a["name"], a["scale"]) for a in llm.adapters] == [(0, "x", 0.5), (1, "y", 1.0)]
        json.dumps(llm.adapters)
    with LLM(model, devices=["numpy"], lora=path, lora_init_without_apply=True) as llm:
        assert llm.adapters[0]["scale"] == 0
