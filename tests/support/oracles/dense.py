"""Fixtures without experts: RMS norms and, except in apertus, a gated FFN."""

from __future__ import annotations

from math import log, pi, sqrt

import numpy as np
from oracles.fixture import N_CTX, Fixture
from oracles.parts import (
    HEAD_DIM,
    N_EMBD,
    N_FF,
    attention,
    base,
    feed_forward,
    fixture,
    wide_norms,
)

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 128}


def llama3_factors(n_rot: int, freq_base: float) -> np.ndarray:
    low, high, original = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"], LLAMA3["original"]
    wavelength = 2 * pi * freq_base ** (np.arange(0, n_rot, 2) / n_rot)
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    return 1 / (smooth + (1 - smooth) / LLAMA3["factor"])


@fixture("llama")
def llama(m: Fixture) -> None:
    """Build a model with RoPE frequency factors, and with biases in all layers."""
    base(m, 4)
    m.put("rope_freqs.weight", llama3_factors(HEAD_DIM, 1000.0))
    for il in range(4):
        attention(m, il, bias="qkvo")
        feed_forward(m, il, bias=True)


LONG_FACTORS = [1.0, 1.1, 1.4, 2.0, 3.0, 5.0, 8.0, 12.0]


SHORT_FACTORS = [1.0, 1.0, 1.05, 1.1, 1.2, 1.4, 1.7, 2.1]


def longrope(m: Fixture, original: int, n_rot: int = HEAD_DIM) -> None:
    """Add long RoPE factors for positions above the original context length, and short factors for lower
    positions."""
    scale = m.keys["context_length"] / original
    m.keys |= {
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": sqrt(1 + log(scale) / log(original)),
    }
    m.put("rope_factors_long.weight", np.array(LONG_FACTORS[: n_rot // 2]))
    m.put("rope_factors_short.weight", np.array(SHORT_FACTORS[: n_rot // 2]))
    m.unread = ("rope_factors_short" if original < N_CTX else "rope_factors_long",)


@fixture("llama+longrope")
def llama_longrope(m: Fixture) -> None:
    base(m, 3, rope__scaling__type="longrope")
    del m.tensors["output.weight"]
    longrope(m, 32)
    for il in range(3):
        attention(m, il)
        feed_forward(m, il)


@fixture("mistral3")
def mistral3(m: Fixture) -> None:
    """Build a model with YaRN. q is multiplied by 1 + scale * ln(1 + floor(position / original context
    length))."""
    base(
        m, 4, rope__scaling__type="yarn", rope__scaling__factor=16.0,
        rope__scaling__original_context_length=16, rope__scaling__yarn_beta_fast=4.0,
        rope__scaling__yarn_beta_slow=1.0, rope__scaling__yarn_log_multiplier=1.0,
        attention__temperature_scale=0.5,
    )  # fmt: skip
    for il in range(4):
        attention(m, il)
        feed_forward(m, il)


@fixture("qwen2")
def qwen2(m: Fixture) -> None:
    base(m, 4)
    for il in range(4):
        attention(m, il, bias="qkv")
        feed_forward(m, il)


@fixture("qwen2vl")
def qwen2vl(m: Fixture) -> None:
    base(m, 3, rope__dimension_sections=[2, 3, 3, 0])
    for il in range(3):
        attention(m, il, bias="qkv")
        feed_forward(m, il)


@fixture("qwen3")
def qwen3(m: Fixture) -> None:
    base(m, 4, n_kv=1)
    for il in range(4):
        attention(m, il, head_norms=True)
        feed_forward(m, il)


@fixture("qwen3vl")
def qwen3vl(m: Fixture) -> None:
    base(m, 3, rope__dimension_sections=[3, 3, 2, 0])
    for il in range(3):
        attention(m, il, head_norms=True)
        feed_forward(m, il)


def phi3_layers(m: Fixture, n_layer: int) -> None:
    p3 = m.keys
    width = (p3["attention.head_count"] + 2 * p3["attention.head_count_kv"]) * HEAD_DIM
    for il in range(n_layer):
        p = f"blk.{il}."
        m.norm(p + "attn_norm", N_EMBD)
        m.matrix(p + "attn_qkv", width, N_EMBD, gain=1.3)
        m.matrix(p + "attn_output", N_EMBD, N_EMBD)
        m.norm(p + "ffn_norm", N_EMBD)
        m.matrix(p + "ffn_up", 2 * N_FF, N_EMBD)
        m.matrix(p + "ffn_down", N_EMBD, N_FF, gain=2.0)


@fixture("phi3")
def phi3(m: Fixture) -> None:
    base(m, 4, attention__sliding_window=0)
    longrope(m, 32)
    phi3_layers(m, 4)


@fixture("phi3+window")
def phi3_window(m: Fixture) -> None:
    m.alone = "llama.cpp switches phi3's window off"
    base(m, 3, attention__sliding_window=12)
    phi3_layers(m, 3)


@fixture("phi3+short")
def phi3_short(m: Fixture) -> None:
    base(m, 3, attention__sliding_window=0, context_length=4096, rope__dimension_count=12)
    del m.tensors["output.weight"]
    longrope(m, 512, 12)
    phi3_layers(m, 3)


@fixture("glm4")
def glm4(m: Fixture) -> None:
    base(m, 4, rope__dimension_count=HEAD_DIM // 2)
    for il in range(4):
        p = f"blk.{il}."
        attention(m, il, bias="qkv")
        m.norm(p + "post_attention_norm", N_EMBD)
        m.norm(p + "ffn_norm", N_EMBD)
        m.matrix(p + "ffn_up", 2 * N_FF, N_EMBD)
        m.matrix(p + "ffn_down", N_EMBD, N_FF, gain=2.0)
        m.norm(p + "post_ffw_norm", N_EMBD)


GRANITE = {"embedding_scale": 1.5, "residual_scale": 0.6, "attention__scale": 0.4, "logit_scale": 2.5}


@fixture("granite")
def granite(m: Fixture) -> None:
    base(m, 4, **GRANITE)
    for il in range(4):
        attention(m, il)
        feed_forward(m, il)


@fixture("smollm3")
def smollm3(m: Fixture) -> None:
    base(m, 5)
    for il in range(5):
        attention(m, il)
        feed_forward(m, il)


def exaone4_layers(m: Fixture) -> None:
    for il in range(m.keys["block_count"]):
        attention(m, il, head_norms=True, norm="post_attention_norm")
        feed_forward(m, il, norm="post_ffw_norm")


@fixture("exaone4")
def exaone4(m: Fixture) -> None:
    base(m, 4)
    exaone4_layers(m)


@fixture("exaone4+window")
def exaone4_window(m: Fixture) -> None:
    base(m, 5, attention__sliding_window=16)
    m.alone = "llama.cpp has windows in models of 64 layers alone"
    exaone4_layers(m)


@fixture("seed_oss")
def seed_oss(m: Fixture) -> None:
    base(m, 4)
    for il in range(4):
        attention(m, il, bias="qkv")
        feed_forward(m, il, norm="post_attention_norm")


@fixture("ernie4_5")
def ernie4_5(m: Fixture) -> None:
    base(m, 4)
    for il in range(4):
        attention(m, il)
        feed_forward(m, il)


@fixture("hunyuan-dense")
def hunyuan_dense(m: Fixture) -> None:
    base(m, 4)
    for il in range(4):
        attention(m, il, head_norms=True)
        feed_forward(m, il)


def olmo2_layers(m: Fixture) -> None:
    for il in range(m.keys["block_count"]):
        attention(m, il, norm="post_attention_norm")
        wide_norms(m, il)
        feed_forward(m, il, norm="post_ffw_norm")


@fixture("olmo2")
def olmo2(m: Fixture) -> None:
    base(m, 4)
    olmo2_layers(m)


@fixture("olmo2+window")
def olmo2_window(m: Fixture) -> None:
    """Build a model like OLMo 3, with sliding windows in some layers, and YaRN in the layers with full
    attention. Every device has a copy of the single kv head."""
    base(
        m, 5, n_kv=1, attention__sliding_window=16, rope__scaling__type="yarn", rope__scaling__factor=8.0,
        rope__scaling__original_context_length=32,
    )  # fmt: skip
    olmo2_layers(m)


@fixture("apertus")
def apertus(m: Fixture) -> None:
    base(m, 3)
    m.keys |= {"xielu.alpha_p": [0.3, 0.9, -0.4], "xielu.alpha_n": [-0.2, 0.5, 1.1]}
    m.keys |= {"xielu.beta": [0.5, 0.4, 0.6], "xielu.eps": [-1e-6] * 3}
    m.put("rope_freqs.weight", llama3_factors(HEAD_DIM, 1000.0))
    for il in range(3):
        attention(m, il, head_norms=True)
        feed_forward(m, il)
        del m.tensors[f"blk.{il}.ffn_gate.weight"]
