"""Fixtures of further mixtures of experts, and of stablelm, gpt2 and apertus."""

from __future__ import annotations

from math import sqrt
from typing import Any

from oracles.decoders import llama3_factors
from oracles.fixture import Fixture
from oracles.more_decoders import layer_norms
from oracles.newer_decoders import wide_norms
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


@fixture("olmoe")
def olmoe(m: Fixture) -> None:
    base(m, 3, n_kv=4, **EXPERTS, feed_forward_length=N_FF_EXP)
    for il in range(3):
        attention(m, il)
        wide_norms(m, il)
        mixture(m, il)


@fixture("qwen3vlmoe")
def qwen3vlmoe(m: Fixture) -> None:
    base(m, 3, **EXPERTS, rope__dimension_sections=[3, 3, 2, 0])
    for il in range(3):
        attention(m, il, head_norms=True)
        mixture(m, il)


def behind_dense(m: Fixture, n_layer: int, **keys: Any) -> None:
    """A dense layer, then experts chosen by sigmoid and a bias, and a shared one."""
    base(
        m, n_layer, **EXPERTS, expert_shared_count=1, leading_dense_block_count=1, expert_gating_func=2,
        expert_weights_scale=2.5, expert_weights_norm=True, **keys,
    )  # fmt: skip
    for il in range(n_layer):
        attention(m, il, head_norms=True)
        if il == 0:
            feed_forward(m, il)
            continue
        mixture(m, il)
        m.put(f"blk.{il}.exp_probs_b.bias", m.normal(f"blk.{il}.exp_probs_b", N_EXPERT) / 8)
        feed_forward(m, il, norm="", suffix="_shexp")


@fixture("dots1")
def dots1(m: Fixture) -> None:
    behind_dense(m, 3, n_kv=4)


@fixture("exaone-moe")
def exaone_moe(m: Fixture) -> None:
    """A period of windows and one layer more."""
    behind_dense(m, 5, attention__sliding_window=16, expert_shared_feed_forward_length=N_FF_EXP)


@fixture("afmoe")
def afmoe(m: Fixture) -> None:
    """As exaone-moe, with a gate and norms behind attention and FFN."""
    behind_dense(m, 5, attention__sliding_window=16)
    m.tensors["token_embd.weight"] /= 4
    for il in range(5):
        m.matrix(f"blk.{il}.attn_gate", 4 * HEAD_DIM, N_EMBD, gain=2.0)
        for name in ("post_attention_norm", "post_ffw_norm"):
            m.norm(f"blk.{il}.{name}", N_EMBD)


@fixture("stablelm")
def stablelm(m: Fixture) -> None:
    """A quarter of a head rotated."""
    base(m, 3, rope__dimension_count=HEAD_DIM // 4)
    layer_norms(m)
    m.bias("output_norm", N_EMBD)
    for il in range(3):
        attention(m, il, bias="qkv")
        feed_forward(m, il)
        for name in ("attn_norm", "ffn_norm"):
            m.bias(f"blk.{il}.{name}", N_EMBD)


@fixture("gpt2")
def gpt2(m: Fixture) -> None:
    """Positions from a table, q, k and v in one tensor, tied."""
    base(m, 3, n_kv=4)
    layer_norms(m)
    m.bias("output_norm", N_EMBD)
    m.matrix("position_embd", m.keys["context_length"], N_EMBD, gain=sqrt(N_EMBD))
    del m.tensors["output.weight"]
    for name in ("rope.dimension_count", "rope.freq_base", "attention.key_length", "attention.value_length"):
        del m.keys[name]
    for il in range(3):
        p = f"blk.{il}."
        for name in ("attn_norm", "ffn_norm"):
            m.norm(p + name, N_EMBD)
            m.bias(p + name, N_EMBD)
        m.matrix(p + "attn_qkv", 3 * N_EMBD, N_EMBD, gain=1.3, bias=True)
        m.matrix(p + "attn_output", N_EMBD, N_EMBD, bias=True)
        m.matrix(p + "ffn_up", N_FF, N_EMBD, bias=True)
        m.matrix(p + "ffn_down", N_EMBD, N_FF, gain=2.0, bias=True)


@fixture("apertus")
def apertus(m: Fixture) -> None:
    """A curve of its own in every layer, frequency factors."""
    base(m, 3)
    m.keys |= {"xielu.alpha_p": [0.3, 0.9, -0.4], "xielu.alpha_n": [-0.2, 0.5, 1.1]}
    m.keys |= {"xielu.beta": [0.5, 0.4, 0.6], "xielu.eps": [-1e-6] * 3}
    m.put("rope_freqs.weight", llama3_factors(HEAD_DIM, 1000.0))
    for il in range(3):
        attention(m, il, head_norms=True)
        feed_forward(m, il)
        del m.tensors[f"blk.{il}.ffn_gate.weight"]


@fixture("cohere2moe")
def cohere2moe(m: Fixture) -> None:
    """A dense layer without a window and with RoPE, then a period of layers of experts and one more; a shared
    expert."""
    n_layer = 6
    base(
        m, n_layer, **EXPERTS, logit_scale=0.5, attention__sliding_window=16, leading_dense_block_count=1,
        attention__sliding_window_pattern=[il not in (0, 4) for il in range(n_layer)], expert_gating_func=2,
        expert_weights_norm=True, expert_shared_count=1, expert_shared_feed_forward_length=N_FF_EXP,
    )  # fmt: skip
    layer_norms(m)
    m.tensors["token_embd.weight"] /= 4
    for il in range(n_layer):
        attention(m, il)
        if il == 0:
            feed_forward(m, il, norm="")
            continue
        mixture(m, il, norm="")
        feed_forward(m, il, norm="", suffix="_shexp")


@fixture("cohere2moe+rms")
def cohere2moe_rms(m: Fixture) -> None:
    """RMS norms, the weights as they are, tied."""
    base(
        m, 3, **EXPERTS, logit_scale=0.5, attention__sliding_window=16, leading_dense_block_count=0,
        attention__sliding_window_pattern=[False, True, True],
    )  # fmt: skip
    del m.tensors["output.weight"]
    m.tensors["token_embd.weight"] /= 4
    for il in range(3):
        attention(m, il)
        mixture(m, il, norm="")
