"""Fixtures without recurrent layers: llama, mistral3, qwen2, qwen2moe, qwen3, qwen3moe, phi3, glm4, glm4moe,
gpt-oss."""

from __future__ import annotations

from math import log, pi, sqrt

import numpy as np
from oracles.fixture import N_CTX, Fixture
from oracles.parts import (
    EXPERTS,
    HEAD_DIM,
    N_EMBD,
    N_EXPERT,
    N_FF,
    N_FF_EXP,
    attention,
    base,
    feed_forward,
    fixture,
    mixture,
)

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original": 128}


def llama3_factors(n_rot: int, freq_base: float) -> np.ndarray:
    """Llama 3.1's: long wavelengths are divided by `factor`, short ones kept, those between blended."""
    low, high, original = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"], LLAMA3["original"]
    wavelength = 2 * pi * freq_base ** (np.arange(0, n_rot, 2) / n_rot)
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    return 1 / (smooth + (1 - smooth) / LLAMA3["factor"])


@fixture("llama")
def llama(m: Fixture) -> None:
    """Frequency factors, biases everywhere."""
    base(m, 4)
    m.put("rope_freqs.weight", llama3_factors(HEAD_DIM, 1000.0))
    for il in range(4):
        attention(m, il, bias="qkvo")
        feed_forward(m, il, bias=True)


@fixture("llama+experts")
def llama_experts(m: Fixture) -> None:
    base(m, 4, **{**EXPERTS, "feed_forward_length": N_FF_EXP})
    for il in range(4):
        attention(m, il)
        mixture(m, il)


LONG_FACTORS = [1.0, 1.1, 1.4, 2.0, 3.0, 5.0, 8.0, 12.0]
SHORT_FACTORS = [1.0, 1.0, 1.05, 1.1, 1.2, 1.4, 1.7, 2.1]


def longrope(m: Fixture, original: int, n_rot: int = HEAD_DIM) -> None:
    """Long and short factors; long ones where the context is longer than the original one."""
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
    """A tied output matrix too."""
    base(m, 3, rope__scaling__type="longrope")
    del m.tensors["output.weight"]
    longrope(m, 32)
    for il in range(3):
        attention(m, il)
        feed_forward(m, il)


@fixture("mistral3")
def mistral3(m: Fixture) -> None:
    """YaRN, and q times 1 + scale * ln(1 + floor(position / original context length))."""
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


@fixture("qwen2moe")
def qwen2moe(m: Fixture) -> None:
    """The chosen experts' weights are not normalised; a shared expert with a gate."""
    base(m, 4, **EXPERTS, expert_shared_feed_forward_length=48)
    for il in range(4):
        attention(m, il, bias="qkv")
        mixture(m, il)
        feed_forward(m, il, norm="", suffix="_shexp")
        m.put(f"blk.{il}.ffn_gate_inp_shexp.weight", m.normal(f"blk.{il}.shexp", N_EMBD) / 8)


@fixture("qwen3")
def qwen3(m: Fixture) -> None:
    base(m, 4, n_kv=1)
    for il in range(4):
        attention(m, il, head_norms=True)
        feed_forward(m, il)


@fixture("qwen3moe")
def qwen3moe(m: Fixture) -> None:
    base(m, 4, **EXPERTS)
    for il in range(4):
        attention(m, il, head_norms=True)
        mixture(m, il)


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
    """Fused qkv, gate and up; long factors."""
    base(m, 4, attention__sliding_window=0)
    longrope(m, 32)
    phi3_layers(m, 4)


@fixture("phi3+window")
def phi3_window(m: Fixture) -> None:
    """The window of Phi-3-mini-4k."""
    m.alone = "llama.cpp switches phi3's window off"
    base(m, 3, attention__sliding_window=12)
    phi3_layers(m, 3)


@fixture("phi3+short")
def phi3_short(m: Fixture) -> None:
    """Short factors, three quarters of a head rotated, tied."""
    base(m, 3, attention__sliding_window=0, context_length=4096, rope__dimension_count=12)
    del m.tensors["output.weight"]
    longrope(m, 512, 12)
    phi3_layers(m, 3)


@fixture("glm4")
def glm4(m: Fixture) -> None:
    """Half of a head rotated in adjacent pairs, fused gate and up, norms after attention and FFN."""
    base(m, 4, rope__dimension_count=HEAD_DIM // 2)
    for il in range(4):
        p = f"blk.{il}."
        attention(m, il, bias="qkv")
        m.norm(p + "post_attention_norm", N_EMBD)
        m.norm(p + "ffn_norm", N_EMBD)
        m.matrix(p + "ffn_up", 2 * N_FF, N_EMBD)
        m.matrix(p + "ffn_down", N_EMBD, N_FF, gain=2.0)
        m.norm(p + "post_ffw_norm", N_EMBD)


@fixture("glm4moe")
def glm4moe(m: Fixture) -> None:
    """A dense layer first; sigmoid routing with a bias for selection only; a shared expert; a layer that
    predicts one token further, which nothing reads."""
    base(
        m, 5, **EXPERTS, rope__dimension_count=HEAD_DIM // 2, expert_shared_count=1,
        leading_dense_block_count=1, expert_gating_func=2, expert_weights_scale=1.5, expert_weights_norm=True,
        nextn_predict_layers=1,
    )  # fmt: skip
    for il in range(5):
        p = f"blk.{il}."
        attention(m, il, bias="qkv", head_norms=True)
        m.norm(p + "post_attention_norm", N_EMBD)
        if il == 0:
            feed_forward(m, il, norm="")
            continue
        mixture(m, il, norm="")
        m.bias(p + "exp_probs_b", N_EXPERT)
        feed_forward(m, il, norm="", suffix="_shexp")
    m.unread = ("blk.4.",)
    m.matrix("blk.4.nextn.eh_proj", N_EMBD, 2 * N_EMBD)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        m.norm(f"blk.4.nextn.{name}", N_EMBD)


@fixture("gpt-oss")
def gpt_oss(m: Fixture) -> None:
    """A window in every other layer, sinks, biases everywhere, experts chosen and weighted by raw logits."""
    base(
        m, 5, **EXPERTS, attention__sliding_window=12, rope__scaling__type="yarn", rope__scaling__factor=8.0,
        rope__scaling__original_context_length=64, rope__freq_base=150.0,
    )  # fmt: skip
    for il in range(5):
        p = f"blk.{il}."
        attention(m, il, bias="qkvo")
        m.put(p + "attn_sinks.weight", m.normal(p + "attn_sinks", 4) + 1)
        mixture(m, il, bias=True, norm="post_attention_norm")
