"""Fixtures of decoders of 2024 to 2026: olmo2, minimax-m2."""

from __future__ import annotations

from typing import Any

from oracles.fixture import Fixture
from oracles.more_decoders import deepseek2_keys, deepseek2_layers
from oracles.parts import (
    EXPERTS,
    HEAD_DIM,
    N_EMBD,
    N_EXPERT,
    N_FF_EXP,
    attention,
    base,
    feed_forward,
    fixture,
    mixture,
)


def wide_norms(m: Fixture, il: int) -> None:
    """Norms of q and k over all heads at once."""
    for name, n in (("q", m.keys["attention.head_count"]), ("k", m.keys["attention.head_count_kv"])):
        m.norm(f"blk.{il}.attn_{name}_norm", n * HEAD_DIM)


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
    """As OLMo 3: a period of windows and one layer more; YaRN where there is none. One kv head, so several
    devices have a copy of it."""
    base(
        m, 5, n_kv=1, attention__sliding_window=16, rope__scaling__type="yarn", rope__scaling__factor=8.0,
        rope__scaling__original_context_length=32,
    )  # fmt: skip
    olmo2_layers(m)


@fixture("minimax-m2")
def minimax_m2(m: Fixture) -> None:
    """Half of a head rotated."""
    base(
        m, 4, **EXPERTS, rope__dimension_count=HEAD_DIM // 2, expert_gating_func=2,
        feed_forward_length=N_FF_EXP,
    )  # fmt: skip
    for il in range(4):
        attention(m, il)
        wide_norms(m, il)
        mixture(m, il)
        m.put(f"blk.{il}.exp_probs_b.bias", m.normal(f"blk.{il}.exp_probs_b", N_EXPERT) / 8)


@fixture("mistral4")
def mistral4(m: Fixture) -> None:
    """YaRN from 16 positions on, which is where the temperature of q begins too."""
    deepseek2_keys(
        m, 3, attention__q_lora_rank=24, expert_gating_func=1, expert_weights_scale=1.5,
        expert_weights_norm=True, rope__scaling__type="yarn", rope__scaling__factor=4.0,
        rope__scaling__original_context_length=16, rope__scaling__yarn_log_multiplier=0.1,
        attention__temperature_scale=0.5, attention__temperature_length=16,
    )  # fmt: skip
    deepseek2_layers(m, 3)


def lfm2_layers(m: Fixture) -> None:
    """Convolutions and attention in turns, a dense layer in front of experts, if there are any."""
    base(m, 5, n_kv=[0, 2, 0, 0, 2], shortconv__l_cache=3, **(EXPERTS if m.arch == "lfm2moe" else {}))
    m.tensors["token_embd_norm.weight"] = m.tensors.pop("output_norm.weight")
    del m.tensors["output.weight"]
    m.tensors["token_embd.weight"] /= 4
    kv_heads = m.keys["attention.head_count_kv"]
    for il, n_kv in enumerate(kv_heads):
        if n_kv:
            m.keys["attention.head_count_kv"] = n_kv
            attention(m, il, head_norms=True)
        else:
            p = f"blk.{il}.shortconv."
            m.norm(f"blk.{il}.attn_norm", N_EMBD)
            m.matrix(p + "in_proj", 3 * N_EMBD, N_EMBD)
            m.put(p + "conv.weight", 0.6 * m.normal(p + "conv", N_EMBD, 3))
            m.matrix(p + "out_proj", N_EMBD, N_EMBD, gain=1.5)
        if "expert_count" not in m.keys or il == 0:
            feed_forward(m, il)
            continue
        mixture(m, il)
        m.put(f"blk.{il}.exp_probs_b.bias", m.normal(f"blk.{il}.exp_probs_b", N_EXPERT) / 8)
    m.keys["attention.head_count_kv"] = kv_heads


@fixture("lfm2")
def lfm2(m: Fixture) -> None:
    lfm2_layers(m)


@fixture("lfm2moe")
def lfm2moe(m: Fixture) -> None:
    lfm2_layers(m)
    m.keys |= {"leading_dense_block_count": 1, "expert_gating_func": 2}


def llama4_layers(m: Fixture, n_layer: int, **keys: Any) -> None:
    """Experts and a shared one in every second layer."""
    base(m, n_layer, **{**EXPERTS, "expert_used_count": 1}, interleave_moe_layer_step=2, **keys)
    for il in range(n_layer):
        attention(m, il)
        if il % 2 == 0:
            feed_forward(m, il)
            continue
        mixture(m, il)
        feed_forward(m, il, norm="", suffix="_shexp")


@fixture("llama4")
def llama4(m: Fixture) -> None:
    """A period and one layer more."""
    llama4_layers(m, 5)


@fixture("llama4+chunks")
def llama4_chunks(m: Fixture) -> None:
    """Chunks of 16, and a temperature that grows with every 16 positions."""
    m.alone = "llama.cpp has chunks of 8,192 alone"
    llama4_layers(m, 4, attention__sliding_window=16, attention__temperature_length=16)
