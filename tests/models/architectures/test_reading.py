"""The strict reader accepts real files with optional biases, soft-caps, keys that disable a feature, layers
for multi-token prediction, or unused tensors.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from device_sets import nmse, only
from oracles.fixture import PROMPT, Fixture, write
from oracles.fixtures import FIXTURES, build
from prefills import prefilled
from runners import load_runner

from vkbackend.errors import UnsupportedModel
from vkbackend.models.architectures.base import Model
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.placement.tensors import check_weights, notes

TOKENS = PROMPT[:14]
WHOLE = [name for name in FIXTURES if "+" not in name]
architectures = pytest.mark.parametrize("name", only(FIXTURES, *WHOLE))
few_architectures = pytest.mark.parametrize("name", only(FIXTURES, *WHOLE[::4]))
PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv", "attn_kv_a_mqa")
LINEAR = ("kimi-linear", "kimi-k3", "glm5-next")  # attn_k is of linear attention, which has no softmax
QUICK = ("phi3", "llama")
SOFT_CAPS = ("gemma2", "gemma3", "gemma3n", "gemma4", "grok", "muse-glimmer")
OFF: dict[str, Any] = {
    "attention.scale": 0.0,
    "attention.clamp_kqv": -math.inf,
    "attention.sliding_window": 0,
    "attn_logit_softcapping": 0.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_weights_scale": 0.0,
    "expert_group_count": 0,
    "expert_gating_func": 0,
    "final_logit_softcapping": 0.0,
    "leading_dense_block_count": 0,
    "nextn_predict_layers": 0,
    "rope.dimension_sections": [0, 0, 0, 0],
    "rope.scaling.attn_factor": 0.0,
    "rope.scaling.factor": 0.0,
    "rope.scaling.type": "",
    "rope.scaling.original_context_length": 0,
}


def read_model(fixture: Fixture, path: Path) -> tuple[Model, list[str]]:
    with GGUF.open(write(fixture, path)) as gguf:
        model = load_model(gguf)
        check_weights(gguf, model)
        return model, notes(gguf, model, model.n_ctx_train)


@cache
def plain(name: str) -> Model:
    with TemporaryDirectory() as folder:
        return read_model(build(name), Path(folder) / "plain.gguf")[0]


def logits(path: Path, n: int) -> np.ndarray:
    return prefilled(path, ["numpy"] * n, TOKENS, n_ctx=32, n_ubatch=16, reduce_type="f32")


@pytest.mark.parametrize("name", only(FIXTURES, *QUICK))
def test_biases_of_attention_are_optional(tmp_path: Path, name: str) -> None:
    fixture = build(name)
    projections = [
        tensor.removesuffix(".weight")
        for tensor in fixture.tensors
        if tensor.split(".")[-2] in PROJECTIONS
        and tensor.endswith(".weight")
        and ".indexer." not in tensor  # of short texts, an indexer chooses all positions
        and not (fixture.unread and tensor.startswith(fixture.unread))
        and not (fixture.arch == "deci" and f"{tensor[:6]}attn_q.weight" not in fixture.tensors)  # no biases
    ]
    projections = [tensor for tensor in projections if f"{tensor}.bias" not in fixture.tensors]
    kinds = {tensor.split(".")[-1] for tensor in projections}
    for tensor in projections:
        fixture.put(f"{tensor}.bias", np.zeros(len(fixture[f"{tensor}.weight"])))
    zeros = logits(write(fixture, tmp_path / "zeros.gguf"), 1)
    assert np.array_equal(zeros, logits(write(build(name), tmp_path / "none.gguf"), 1))
    for kind in kinds:
        fixture = build(name)
        for tensor in (tensor for tensor in projections if tensor.endswith(f".{kind}")):
            fixture.bias(tensor, len(fixture[f"{tensor}.weight"]), scale=1.0)
        path = write(fixture, tmp_path / f"{kind}.gguf")
        single = logits(path, 1)
        if kind == "attn_k" and not plain(name).ropes(64) and fixture.arch not in LINEAR:
            # A constant that is added to all scores of a row does not change their softmax.
            assert nmse(single, zeros) <= 1e-9
            continue
        assert nmse(single, zeros) > 1e-4, kind
        assert nmse(logits(path, 3), single) <= 1e-9, kind


@architectures
def test_keys_at_their_off_value_mean_absent(tmp_path: Path, name: str) -> None:
    fixture, want = build(name), plain(name)
    has_more = "nextn_predict_layers" in fixture.keys
    off_here = {k: v for k, v in OFF.items() if (fixture.arch, k) != ("llama4", "attention.sliding_window")}
    fixture.keys = {**off_here, **fixture.keys}
    off, warnings = read_model(fixture, tmp_path / "off.gguf")
    assert off.config == want.config and off.weights() == want.weights()  # type: ignore[attr-defined]
    assert repr(off.ropes(64)) == repr(want.ropes(64)) and len(warnings) == has_more


def test_llama4_with_a_window_of_0_has_no_chunks(tmp_path: Path) -> None:
    fixture = build("llama4")
    fixture.keys["attention.sliding_window"] = 0
    model, _ = read_model(fixture, tmp_path / "model.gguf")
    assert model.turned == (True,) * 5  # type: ignore[attr-defined]
    assert not any(layer.chunk for layer in model.config.layers)  # type: ignore[attr-defined]
    assert nmse(logits(tmp_path / "model.gguf", 2), logits(tmp_path / "model.gguf", 1)) <= 1e-9
    whole = write(build("llama4"), tmp_path / "whole.gguf")
    assert nmse(logits(whole, 1), logits(tmp_path / "model.gguf", 1)) > 1e-4


@pytest.mark.parametrize("name", only(FIXTURES, *SOFT_CAPS, *WHOLE[::4]))
def test_a_soft_cap_needs_an_architecture_with_soft_caps(tmp_path: Path, name: str) -> None:
    fixture = build(name)
    fixture.keys |= {"final_logit_softcapping": 7.0, "attn_logit_softcapping": 5.0}
    model, _ = read_model(fixture, tmp_path / "model.gguf")
    want = 7.0 if fixture.arch in SOFT_CAPS else 0.0
    assert model.config.softcap == want  # type: ignore[attr-defined]


@few_architectures
def test_multi_token_prediction_layers_are_skipped(tmp_path: Path, name: str) -> None:
    fixture = build(name)
    n_ahead = fixture.keys.get("nextn_predict_layers", 0)
    fixture.keys["block_count"] += 1
    fixture.keys["nextn_predict_layers"] = n_ahead + 1
    il = fixture.keys["block_count"] - 1
    more = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "attn_q", "attn_norm", "ffn_up")
    for tensor in more:
        fixture.put(f"blk.{il}.{tensor}.weight", np.ones((3, 5)))
    model, warnings = read_model(fixture, tmp_path / "model.gguf")
    assert model.n_layer == plain(name).n_layer and model.weights() == plain(name).weights()
    [line] = warnings
    assert "unused tensors of layers" in line and (f"(nextn): {len(more)} (" in line or n_ahead)


@pytest.mark.parametrize("name", ["deepseek4+short", "qwen3moe"])
def test_heads_that_a_file_lacks_do_not_count(tmp_path: Path, name: str) -> None:
    fixture = build(name)
    fixture.keys["nextn_predict_layers"] = 1
    model, warnings = read_model(fixture, tmp_path / "model.gguf")
    assert model.n_layer == plain(name).n_layer and model.weights() == plain(name).weights()
    [line] = warnings
    assert "has no tensors of multi-token prediction heads" in line


@few_architectures
def test_unread_tensors_are_named(tmp_path: Path, name: str) -> None:
    fixture = build(name)
    fixture.put("blk.1.surprise.weight", np.ones(8))
    fixture.put("other.bias", np.ones(8))
    with pytest.raises(UnsupportedModel, match=r"2 tensors that .* does not use: blk.1.surprise.*other"):
        read_model(fixture, tmp_path / "model.gguf")


def test_gpt2_refuses_positions_beyond_its_table(tmp_path: Path) -> None:
    path = write(build("gpt2"), tmp_path / "model.gguf")
    load_runner(path, devices=["numpy"], n_ctx=256).close()
    with pytest.raises(UnsupportedModel, match=r"a context of 257 tokens .* 256 position embeddings"):
        load_runner(path, devices=["numpy"], n_ctx=257)


def test_minicpm_without_factors_has_the_first_models_factors(tmp_path: Path) -> None:
    fixture = build("minicpm")
    for key in ("embedding_scale", "residual_scale", "logit_scale"):
        del fixture.keys[key]
    model, _ = read_model(fixture, tmp_path / "model.gguf")
    factors = model.embedding_scale, model.residual_scale, model.logit_scale  # type: ignore[attr-defined]
    assert factors == (12.0, 1.4 / math.sqrt(3), 64 / 256)


def test_baichuan_of_40_layers_has_alibi(tmp_path: Path) -> None:
    """Files of Baichuan 7B and 13B differ only in their sizes."""
    fixture = build("baichuan")
    fixture.keys["block_count"] = 40
    for il in range(3, 40):
        fixture.tensors |= {
            f"blk.{il}.{name[6:]}": values
            for name, values in fixture.tensors.items()
            if name.startswith("blk.0.")
        }
    model, _ = read_model(fixture, tmp_path / "model.gguf")
    assert not model.has_rope(0) and model.max_bias == 8.0  # type: ignore[attr-defined]
    small, _ = read_model(build("baichuan"), tmp_path / "small.gguf")
    assert small.has_rope(0) and small.max_bias == 0.0  # type: ignore[attr-defined]


def test_bitnet_with_another_activation_is_refused(tmp_path: Path) -> None:
    fixture = build("bitnet+relu2")
    fixture.keys["hidden_activation"] = "gelu"
    with pytest.raises(UnsupportedModel, match="hidden_activation = 'gelu'"):
        read_model(fixture, tmp_path / "model.gguf")
