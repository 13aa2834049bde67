"""Fixtures whose experts are chosen by a softmax."""

from __future__ import annotations

from typing import Any

import numpy as np
from oracles.dense import GRANITE, longrope
from oracles.fixture import N_VOCAB, Fixture
from oracles.layer_norm import layer_norms
from oracles.parts import (
    EXPERTS,
    N_EMBD,
    N_EXPERT,
    N_FF_EXP,
    attention,
    base,
    feed_forward,
    fixture,
    fuse_experts,
    mixture,
)


def shared_experts(m: Fixture, n_layer: int, **keys: Any) -> None:
    """Add experts and two shared experts to all but the leading dense layers."""
    base(m, n_layer, **EXPERTS, expert_shared_count=2, **keys)
    for il in range(n_layer):
        attention(m, il)
        if il < m.keys.get("leading_dense_block_count", 0):
            feed_forward(m, il)
            continue
        mixture(m, il)
        p = f"blk.{il}.ffn_"
        for name in ("gate", "up"):
            m.matrix(f"{p}{name}_shexp", 2 * N_FF_EXP, m.keys["embedding_length"])
        m.matrix(f"{p}down_shexp", m.keys["embedding_length"], 2 * N_FF_EXP, gain=2.0)


@fixture("deepseek")
def deepseek(m: Fixture) -> None:
    shared_experts(m, 3, leading_dense_block_count=1)


@fixture("bailingmoe")
def bailingmoe(m: Fixture) -> None:
    shared_experts(m, 3, leading_dense_block_count=0, expert_weights_norm=True)


def mellum_layers(m: Fixture, n_layer: int, **keys: Any) -> None:
    base(
        m, n_layer, **EXPERTS, attention__sliding_window=12, **keys, rope__scaling__type="yarn",
        attention__sliding_window_pattern=[il % 2 == 0 for il in range(n_layer)], rope__scaling__factor=8.0,
        rope__scaling__original_context_length=32,
    )  # fmt: skip
    for il in range(n_layer):
        attention(m, il, head_norms=True)
        mixture(m, il)


@fixture("mellum")
def mellum(m: Fixture) -> None:
    mellum_layers(m, 4)


@fixture("mellum+bases")
def mellum_bases(m: Fixture) -> None:
    m.alone = "llama.cpp ignores the RoPE base of mellum's windows"
    mellum_layers(m, 2, rope__freq_base_swa=300.0)


SWASH: dict[str, Any] = {
    **GRANITE,
    "attention__sliding_window": 12,
    "attention__sliding_window_pattern": [False, True, True, True],
    "attention__rope_pattern": [False, True, True, False],
}


def sinks(m: Fixture, il: int) -> None:
    name = f"blk.{il}.attn_sinks"
    m.put(f"{name}.weight", m.normal(name, m.keys["attention.head_count"]) + 3)


@fixture("granite_swa")
def granite_swa(m: Fixture) -> None:
    base(m, 4, **SWASH)
    for il in range(4):
        attention(m, il)
        sinks(m, il)
        feed_forward(m, il)


@fixture("granite_swa+experts")
def granite_swa_experts(m: Fixture) -> None:
    base(m, 4, **SWASH, **EXPERTS, feed_forward_length=N_FF_EXP, expert_shared_feed_forward_length=48)
    for il in range(4):
        attention(m, il)
        sinks(m, il)
        mixture(m, il)
        fuse_experts(m, il)
        feed_forward(m, il, norm="", suffix="_shexp")
        p = f"blk.{il}.ffn_"
        gate, up = (m.tensors.pop(f"{p}{name}_shexp.weight") for name in ("gate", "up"))
        m.put(f"{p}up_shexp.weight", np.concatenate([gate, up]))


@fixture("smallthinker")
def smallthinker(m: Fixture) -> None:
    base(m, 5, **EXPERTS, feed_forward_length=N_FF_EXP, expert_gating_func=2, attention__sliding_window=4096)
    for il in range(5):
        attention(m, il)
        mixture(m, il, gain=1.0)


@fixture("smallthinker+softmax")
def smallthinker_softmax(m: Fixture) -> None:
    """Build a model without windows, in which every layer has RoPE."""
    base(m, 2, **EXPERTS, feed_forward_length=N_FF_EXP, expert_gating_func=1)
    for il in range(2):
        attention(m, il)
        mixture(m, il, gain=1.0)


@fixture("arctic")
def arctic(m: Fixture) -> None:
    base(m, 3, **EXPERTS, feed_forward_length=N_FF_EXP)
    for il in range(3):
        attention(m, il)
        mixture(m, il, norm="ffn_norm_exps")
        p = f"blk.{il}."
        m.norm(p + "ffn_norm", N_EMBD)
        for name in ("gate", "up", "down"):
            m.matrix(f"{p}ffn_{name}", N_EMBD, N_EMBD)


@fixture("dbrx")
def dbrx(m: Fixture) -> None:
    """Build a model whose limit of 1 clamps a third of q, k and v."""
    base(m, 3, **EXPERTS, feed_forward_length=N_FF_EXP, attention__clamp_kqv=1.0)
    layer_norms(m)
    m.keys["attention.layer_norm_epsilon"] = 1e-5
    for il in range(3):
        attention(m, il)
        p = f"blk.{il}.attn_"
        m.put(f"{p}qkv.weight", np.concatenate([m.tensors.pop(f"{p}{name}.weight") for name in "qkv"]))
        mixture(m, il, norm="attn_output_norm")


@fixture("phimoe")
def phimoe(m: Fixture) -> None:
    """Build a model in which 2 % of the experts' routing weights differ from 1."""
    m.alone = "llama.cpp has RMS norms, and one softmax over both experts"
    base(m, 3, **EXPERTS, feed_forward_length=N_FF_EXP, context_length=4096)
    longrope(m, 512)
    m.bias("output", N_VOCAB)
    m.bias("output_norm", N_EMBD)
    for il in range(3):
        attention(m, il, bias="qkvo")
        mixture(m, il)
        for name in ("attn_norm", "ffn_norm"):
            m.bias(f"blk.{il}.{name}", N_EMBD)


@fixture("grovemoe")
def grovemoe(m: Fixture) -> None:
    m.alone = "llama.cpp gives the second experts other inputs and weights"
    n_second = 32
    base(
        m, 3, **EXPERTS, experts_per_group=2, expert_chunk_feed_forward_length=n_second,
        expert_group_scale=0.5,
    )  # fmt: skip
    for il in range(3):
        attention(m, il, head_norms=True)
        mixture(m, il)
        p = f"blk.{il}.ffn_"
        for name in ("gate", "up"):
            m.matrix(f"{p}{name}_chexps", N_EXPERT // 2, n_second, N_EMBD)
        m.matrix(f"{p}down_chexps", N_EXPERT // 2, N_EMBD, n_second, gain=2.0)


def grok_layers(m: Fixture, n_layer: int, **keys: Any) -> None:
    base(
        m, n_layer, **EXPERTS, embedding_scale=0.5, logit_scale=0.6, attention__output_scale=0.3,
        attn_logit_softcapping=5.0, **keys,
    )  # fmt: skip
    for il in range(n_layer):
        attention(m, il)
        mixture(m, il)
        m.norm(f"blk.{il}.attn_output_norm", N_EMBD)


@fixture("grok")
def grok(m: Fixture) -> None:
    """Build a model like Grok-2, with a dense FFN and a soft-cap of the router's logits."""
    m.alone = "llama.cpp has no soft-cap of the router, and normalises the weights of experts"
    grok_layers(m, 3, router_logit_softcapping=2.0, final_logit_softcapping=4.0)
    for il in range(3):
        m.norm(f"blk.{il}.post_ffw_norm", N_EMBD)
        feed_forward(m, il, norm="")


@fixture("grok+norm")
def grok_norm(m: Fixture) -> None:
    """Build a model like Grok-1, but with normalised weights of experts, as in llama.cpp."""
    grok_layers(m, 2, expert_weights_norm=True)
    for il in range(2):
        m.norm(f"blk.{il}.layer_output_norm", N_EMBD)
