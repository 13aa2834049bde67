"""Files in the layouts of other programs produce the same logits as files of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from device_sets import nmse
from oracles.fixture import N_CTX, N_VOCAB, PROMPT, Fixture, write
from oracles.fixtures import build
from places import GOLDEN
from prefills import opened, prefill

from vkbackend.models.architectures.registry import load_model
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.placement.tensors import check_weights, notes

pytestmark = pytest.mark.no_vulkan
OPTIONS = {"n_ctx": N_CTX, "n_ubatch": N_CTX, "reduce_type": "f32"}


def logits(path: Path, n_devices: int = 1) -> np.ndarray:
    with opened(path, ["numpy"] * n_devices, **OPTIONS) as runner:
        return prefill(runner, PROMPT)


def zero_heads(m: Fixture) -> None:
    """Set the number of heads to 0 in layers without attention, as llama.cpp's test-llama-archs does."""
    heads = m.keys["attention.head_count"]
    m.keys["attention.head_count"] = [heads * bool(n) for n in m.keys["attention.head_count_kv"]]


def more_tensors(m: Fixture) -> None:
    m.put("rope_freqs.weight", np.linspace(1, 9, m.keys["rope.dimension_count"] // 2))
    m.put("v.blk.0.attn_q.weight", np.ones((8, 8)))
    m.put("mm.0.bias", np.ones(8))


def grouped(m: Fixture) -> None:
    """Add the axis of groups that files saved by llama.cpp have, and the biases for positions of images of
    DeepSeek V4 Flash Vision."""
    axes = {"attn_output_a": m.keys.get("attention.output_group_count")}
    axes |= {f"{name}_norm": m.keys["hyper_connection.count"] for name in ("hc_attn", "hc_ffn", "output_hc")}
    for name, value in m.tensors.items():
        if n := axes.get(name.removesuffix(".weight").rpartition(".")[2]):
            m.tensors[name] = value.reshape(n, value.shape[0] // n, *value.shape[1:])
    if m.arch == "deepseek4":
        m.put("blk.0.exp_probs_b_vl.bias", np.ones(m.keys["expert_count"]))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("deepseek4+short", grouped),
        pytest.param("qwen4exp", grouped, marks=pytest.mark.wide),
        pytest.param("lfm2moe", zero_heads, marks=pytest.mark.wide),
        ("nemotron_h", zero_heads),
        pytest.param("granitehybrid", zero_heads, marks=pytest.mark.wide),
        ("falcon-h1", more_tensors),
        pytest.param("granitehybrid", more_tensors, marks=pytest.mark.wide),
    ],
)
def test_the_logits_are_equal(tmp_path: Path, name: str, change: Callable[[Fixture], None]) -> None:
    fixture = build(name)
    change(fixture)
    got = logits(write(fixture, tmp_path / "model.gguf"), n_devices=2)
    assert nmse(got, np.load(GOLDEN / f"{name}.npz")["logits"]) <= 1e-9


@pytest.mark.parametrize("name", ["falcon-h1", "granitehybrid"])
def test_tensors_that_change_nothing_are_named(tmp_path: Path, name: str) -> None:
    fixture = build(name)
    more_tensors(fixture)
    with GGUF.open(write(fixture, tmp_path / "model.gguf")) as gguf:
        model = load_model(gguf)
        check_weights(gguf, model)
        encoders, factors = notes(gguf, model, N_CTX)
    assert encoders.startswith("unused tensors for images or audio: 2 (v.blk.0.attn_q.weight, ")
    assert factors == f"{name} does not use the file's rope_freqs.weight"


def test_experts_in_every_second_layer(tmp_path: Path) -> None:
    """In a model of two layers, "experts in every second layer" and "experts after one dense layer" mean the
    same."""
    fixture = build("ernie4_5-moe")
    fixture.keys["block_count"] = 2
    for name in [name for name in fixture.tensors if name.startswith(("blk.2.", "blk.3."))]:
        del fixture.tensors[name]
    first = logits(write(fixture, tmp_path / "first.gguf"))
    fixture.keys |= {"leading_dense_block_count": 0, "interleave_moe_layer_step": 2}
    assert np.array_equal(logits(write(fixture, tmp_path / "second.gguf")), first)


@pytest.mark.wide
def test_a_bias_of_the_output_is_added(tmp_path: Path) -> None:
    fixture = build("qwen2")
    bias = np.linspace(-1, 1, N_VOCAB, dtype=np.float32)
    plain = write(fixture, tmp_path / "plain.gguf")
    fixture.tensors["output.bias"] = bias
    with (
        opened(plain, ["numpy"]) as one,
        opened(write(fixture, tmp_path / "bias.gguf"), ["numpy"] * 2) as two,
    ):
        np.testing.assert_allclose(
            prefill(two) - prefill(one), np.tile(bias, (len(prefill(one)), 1)), atol=1e-4
        )
