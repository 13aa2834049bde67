"""Fixtures of decoders from 2022 to 2024."""

from __future__ import annotations

import numpy as np
from oracles.dense import LONG_FACTORS, SHORT_FACTORS, llama3_factors
from oracles.fixture import Fixture
from oracles.layer_norm import layer_norms
from oracles.parts import HEAD_DIM, N_EMBD, N_FF, attention, base, feed_forward, fixture

SIZES = "attention.key_length", "attention.value_length", "rope.dimension_count"


def without(m: Fixture, *names: str) -> None:
    for name in names:
        m.keys.pop(name, None)
        for tensor in [t for t in m.tensors if t.removesuffix(".weight").endswith(name)]:
            del m.tensors[tensor]


def fuse_qkv(m: Fixture, il: int) -> None:
    p = f"blk.{il}.attn_"
    for kind in ("weight", "bias"):
        if f"{p}q.{kind}" in m.tensors:
            m.put(f"{p}qkv.{kind}", np.concatenate([m.tensors.pop(f"{p}{name}.{kind}") for name in "qkv"]))


def normed(m: Fixture, n_layer: int, names: tuple[str, ...] = ("attn_norm", "ffn_norm")) -> None:
    layer_norms(m)
    m.bias("output_norm", N_EMBD)
    for il in range(n_layer):
        for name in names:
            m.bias(f"blk.{il}.{name}", N_EMBD)


@fixture("internlm2")
def internlm2(m: Fixture) -> None:
    base(m, 3)
    for il in range(3):
        attention(m, il)
        feed_forward(m, il)


@fixture("exaone")
def exaone(m: Fixture) -> None:
    base(m, 3)
    del m.tensors["output.weight"]
    m.put("rope_freqs.weight", llama3_factors(HEAD_DIM, 1000.0))
    for il in range(3):
        attention(m, il)
        feed_forward(m, il)


@fixture("qwen")
def qwen(m: Fixture) -> None:
    base(m, 3, n_kv=4)
    without(m, "attention.head_count_kv", *SIZES[:2])
    for il in range(3):
        m.keys |= {"attention.head_count_kv": 4, "attention.key_length": HEAD_DIM}
        attention(m, il, bias="qkv")
        without(m, "attention.head_count_kv", "attention.key_length")
        fuse_qkv(m, il)
        feed_forward(m, il)
    m.keys["feed_forward_length"] = 2 * N_FF


@fixture("chatglm")
def chatglm(m: Fixture) -> None:
    base(m, 3, rope__dimension_count=HEAD_DIM // 2)
    for il in range(3):
        attention(m, il, bias="qkv")
        fuse_qkv(m, il)
        feed_forward(m, il)
        gate, up = (m.tensors.pop(f"blk.{il}.ffn_{name}.weight") for name in ("gate", "up"))
        m.put(f"blk.{il}.ffn_up.weight", np.concatenate([gate, up]))


def bitnet_layers(m: Fixture) -> None:
    del m.tensors["output.weight"]
    for il in range(m.keys["block_count"]):
        attention(m, il)
        m.norm(f"blk.{il}.attn_sub_norm", N_EMBD)
        feed_forward(m, il)
        m.norm(f"blk.{il}.ffn_sub_norm", N_FF)


@fixture("bitnet")
def bitnet(m: Fixture) -> None:
    base(m, 3)
    bitnet_layers(m)


@fixture("bitnet+relu2")
def bitnet_relu2(m: Fixture) -> None:
    """Build a model like BitNet b1.58 2B4T."""
    m.alone = "llama.cpp of October 2026 does not read the activation, and uses SiLU"
    base(m, 2, hidden_activation="relu2")
    bitnet_layers(m)


@fixture("minicpm")
def minicpm(m: Fixture) -> None:
    base(
        m, 3, embedding_scale=1.5, residual_scale=0.6, logit_scale=2.5, rope__scaling__type="longrope"
    )  # fmt: skip
    m.put("rope_factors_long.weight", np.array(LONG_FACTORS))
    m.put("rope_factors_short.weight", np.array(SHORT_FACTORS))
    m.unread = ("rope_factors_long",)
    for il in range(3):
        attention(m, il)
        feed_forward(m, il)


@fixture("olmo")
def olmo(m: Fixture) -> None:
    base(m, 3, attention__clamp_kqv=1.25)
    layer_norms(m)
    m.keys["attention.layer_norm_epsilon"] = 1e-5
    for il in range(3):
        attention(m, il)
        feed_forward(m, il)
    without(m, "_norm")


@fixture("phi2")
def phi2(m: Fixture) -> None:
    base(m, 3, n_kv=4, rope__dimension_count=HEAD_DIM // 2)
    m.bias("output", len(m["output.weight"]))
    for il in range(3):
        attention(m, il, bias="qkvo")
        feed_forward(m, il, bias=True, norm="")
    without(m, "ffn_gate", "ffn_gate.bias")
    normed(m, 3, ("attn_norm",))


@fixture("nemotron")
def nemotron(m: Fixture) -> None:
    base(m, 3, rope__dimension_count=HEAD_DIM // 2)
    for il in range(3):
        attention(m, il)
        feed_forward(m, il)
    without(m, "ffn_gate")
    normed(m, 3)


def falcon_layers(m: Fixture, n_layer: int, norms: tuple[str, ...]) -> None:
    for il in range(n_layer):
        attention(m, il)
        fuse_qkv(m, il)
        feed_forward(m, il, norm="")
        for name in norms[1:]:
            m.norm(f"blk.{il}.{name}", N_EMBD)
    without(m, "ffn_gate", *SIZES)
    normed(m, n_layer, norms)


@fixture("falcon")
def falcon(m: Fixture) -> None:
    base(m, 3, n_kv=1)
    del m.tensors["output.weight"]
    falcon_layers(m, 3, ("attn_norm",))


@fixture("falcon+norms")
def falcon_norms(m: Fixture) -> None:
    """Build a model like Falcon 40B, with separate norms of attention and FFN."""
    base(m, 2)
    falcon_layers(m, 2, ("attn_norm", "attn_norm_2"))


def gptneox_layers(m: Fixture, n_layer: int) -> None:
    for il in range(n_layer):
        attention(m, il, bias="qkvo")
        fuse_qkv(m, il)
        feed_forward(m, il, bias=True)
    without(m, "ffn_gate", "ffn_gate.bias", "attention.head_count_kv", *SIZES[:2])
    normed(m, n_layer)


@fixture("gptneox")
def gptneox(m: Fixture) -> None:
    base(m, 3, n_kv=4, rope__dimension_count=HEAD_DIM // 4, use_parallel_residual=True)
    gptneox_layers(m, 3)


@fixture("gptneox+serial")
def gptneox_serial(m: Fixture) -> None:
    base(m, 2, n_kv=4, rope__dimension_count=HEAD_DIM // 4, use_parallel_residual=False)
    gptneox_layers(m, 2)


@fixture("starcoder")
def starcoder(m: Fixture) -> None:
    base(m, 3, n_kv=1)
    del m.tensors["output.weight"]
    m.matrix("position_embd", m.keys["context_length"], N_EMBD, gain=8.0)
    for il in range(3):
        attention(m, il, bias="qkvo")
        fuse_qkv(m, il)
        feed_forward(m, il, bias=True)
    without(m, "ffn_gate", "ffn_gate.bias", "rope.freq_base", *SIZES)
    normed(m, 3)


@fixture("codeshell")
def codeshell(m: Fixture) -> None:
    base(m, 3)
    for il in range(3):
        attention(m, il, bias="qkvo")
        fuse_qkv(m, il)
        feed_forward(m, il, bias=True)
    without(m, "ffn_gate", "ffn_gate.bias", *SIZES)
    normed(m, 3)
