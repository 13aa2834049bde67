"""The tiny models: for every architecture one or more with all that it has, at sizes a software driver bears.

More layers than one period of the pattern, windows shorter than the prompt, GQA and MQA, eight experts of
which two are used, biases that matter. `FIXTURES` maps a name to the function that builds the model.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log, pi, sqrt
from typing import Any

import numpy as np
from models.oracles.fixture import N_CTX, N_VOCAB, Fixture

N_EMBD, HEAD_DIM, N_FF, N_EXPERT, N_FF_EXP = 64, 16, 96, 8, 32
FIXTURES: dict[str, Callable[[Fixture], None]] = {}


def build(name: str) -> Fixture:
    fixture = Fixture(name, name.split("+")[0])
    FIXTURES[name](fixture)
    return fixture


def fixture(name: str) -> Callable[[Callable[[Fixture], None]], Callable[[Fixture], None]]:
    """Register a builder; the name is the architecture, then `+` and what is special."""

    def register(make: Callable[[Fixture], None]) -> Callable[[Fixture], None]:
        FIXTURES[name] = make
        return make

    return register


# ---- parts ----


def base(m: Fixture, n_layer: int, n_head: int = 4, n_kv: int | list[int] = 2, **keys: Any) -> None:
    """The keys and tensors that every architecture has."""
    m.keys |= {
        "block_count": n_layer,
        "context_length": 256,
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_kv,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": HEAD_DIM,
        "rope.freq_base": 1000.0,
        **{key.replace("__", "."): value for key, value in keys.items()},
    }
    m.matrix("token_embd", N_VOCAB, N_EMBD, gain=sqrt(N_EMBD))
    m.norm("output_norm", N_EMBD)
    m.matrix("output", N_VOCAB, N_EMBD)


def attention(
    m: Fixture, il: int, *, bias: str = "", head_norms: bool = False, norm: str = "attn_norm"
) -> None:
    """Norm, q, k, v and output projections; `bias` names those that have one, of "qkvo"."""
    p = f"blk.{il}."
    n_head, n_kv = m.keys["attention.head_count"], m.keys["attention.head_count_kv"]
    head_dim = m.keys["attention.key_length"]
    m.norm(p + norm, N_EMBD)
    m.matrix(p + "attn_q", n_head * head_dim, N_EMBD, gain=1.5, bias="q" in bias)
    m.matrix(p + "attn_k", n_kv * head_dim, N_EMBD, gain=1.5, bias="k" in bias)
    m.matrix(p + "attn_v", n_kv * head_dim, N_EMBD, bias="v" in bias)
    m.matrix(p + "attn_output", N_EMBD, n_head * head_dim, bias="o" in bias)
    if head_norms:
        m.norm(p + "attn_q_norm", head_dim)
        m.norm(p + "attn_k_norm", head_dim)


def feed_forward(
    m: Fixture, il: int, *, bias: bool = False, norm: str = "ffn_norm", suffix: str = ""
) -> None:
    p, n_ff = f"blk.{il}.", m.keys["feed_forward_length"]
    if norm:
        m.norm(p + norm, N_EMBD)
    if suffix:
        n_ff = m.keys.get("expert_shared_feed_forward_length", N_FF_EXP)
    m.matrix(f"{p}ffn_gate{suffix}", n_ff, N_EMBD, bias=bias)
    m.matrix(f"{p}ffn_up{suffix}", n_ff, N_EMBD, bias=bias)
    m.matrix(f"{p}ffn_down{suffix}", N_EMBD, n_ff, gain=2.0, bias=bias)


def mixture(m: Fixture, il: int, *, bias: bool = False, norm: str = "ffn_norm", gain: float = 3.0) -> None:
    """A router that decides clearly and eight experts."""
    p = f"blk.{il}."
    if norm:
        m.norm(p + norm, N_EMBD)
    m.matrix(p + "ffn_gate_inp", N_EXPERT, N_EMBD, gain=gain, bias=bias)
    m.matrix(p + "ffn_gate_exps", N_EXPERT, N_FF_EXP, N_EMBD, bias=bias)
    m.matrix(p + "ffn_up_exps", N_EXPERT, N_FF_EXP, N_EMBD, bias=bias)
    m.matrix(p + "ffn_down_exps", N_EXPERT, N_EMBD, N_FF_EXP, gain=2.0, bias=bias)


EXPERTS: dict[str, Any] = {
    "expert_count": N_EXPERT,
    "expert_used_count": 2,
    "expert_feed_forward_length": N_FF_EXP,
}


# ---- llama and those like it ----


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


@fixture("phi3+short")
def phi3_short(m: Fixture) -> None:
    """Short factors, three quarters of a head rotated, tied."""
    base(m, 3, attention__sliding_window=0, context_length=4096, rope__dimension_count=12)
    del m.tensors["output.weight"]
    longrope(m, 512, 12)
    phi3_layers(m, 3)


# ---- sandwich norms, windows, sinks ----


@fixture("gemma3")
def gemma3(m: Fixture) -> None:
    """Five layers with a window to one without, MQA, norms after attention and FFN, a soft-cap."""
    base(
        m, 7, n_kv=1, attention__sliding_window=12, rope__freq_base=20000.0, rope__scaling__type="linear",
        rope__scaling__factor=4.0, final_logit_softcapping=4.0,
    )  # fmt: skip
    m.keys["rope.freq_base_swa"] = 500.0
    del m.tensors["output.weight"]
    m.tensors["token_embd.weight"] *= np.float32(0.2)
    for il in range(7):
        attention(m, il, head_norms=True)
        m.norm(f"blk.{il}.post_attention_norm", N_EMBD)
        feed_forward(m, il)
        m.norm(f"blk.{il}.post_ffw_norm", N_EMBD)


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


# ---- recurrent layers ----


def delta_net(m: Fixture, il: int) -> tuple[str, int, int]:
    """What qwen3next and qwen35 share; returns the prefix and the widths of all keys and of all values."""
    p, size, n_v = f"blk.{il}.", m.keys["ssm.state_size"], m.keys["ssm.time_step_rank"]
    keys, values = size * m.keys["ssm.group_count"], size * n_v
    m.norm(p + "attn_norm", N_EMBD)
    m.matrix(p + "attn_qkv", 2 * keys + values, N_EMBD)
    m.matrix(p + "attn_gate", values, N_EMBD)
    m.put(
        p + "ssm_conv1d.weight",
        0.6 * m.normal(p + "ssm_conv1d", 2 * keys + values, m.keys["ssm.conv_kernel"]),
    )
    m.bias(p + "ssm_dt", n_v, scale=0.5)
    m.put(p + "ssm_a", -np.exp(0.7 * m.normal(p + "ssm_a", n_v) - 1.5))
    m.norm(p + "ssm_norm", size)
    m.matrix(p + "ssm_out", N_EMBD, values, gain=1.5)
    return p, keys, values


def gated_attention(m: Fixture, il: int) -> None:
    """Attention whose q projection gives q and a gate, head by head."""
    attention(m, il, head_norms=True)
    n_head, head_dim = m.keys["attention.head_count"], m.keys["attention.key_length"]
    del m.tensors[f"blk.{il}.attn_q.weight"]
    m.matrix(f"blk.{il}.attn_q", n_head * 2 * head_dim, N_EMBD, gain=1.5)


def gated_mixture(m: Fixture, il: int) -> None:
    mixture(m, il, norm="")
    feed_forward(m, il, norm="", suffix="_shexp")
    m.put(f"blk.{il}.ffn_gate_inp_shexp.weight", m.normal(f"blk.{il}.shexp", N_EMBD) / 8)


def ssm(n_k: int, n_v: int, size: int = 16) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": 4,
        "ssm.state_size": size,
        "ssm.group_count": n_k,
        "ssm.time_step_rank": n_v,
        "ssm.inner_size": n_v * size,
        "full_attention_interval": 2,
    }


@fixture("qwen3next")
def qwen3next(m: Fixture) -> None:
    """Gated delta nets, two neighbouring value heads per key head; every second layer is gated attention."""
    base(
        m, 5, n_kv=1, **EXPERTS, **ssm(4, 8), rope__dimension_count=HEAD_DIM // 2,
        expert_shared_feed_forward_length=48,
    )  # fmt: skip
    for il in range(5):
        if il % 2:
            gated_attention(m, il)
        else:
            p, _, _ = delta_net(m, il)
            m.matrix(p + "ssm_ba", 2 * 8, N_EMBD)
        m.norm(f"blk.{il}.post_attention_norm", N_EMBD)
        gated_mixture(m, il)
