"""Fixtures with experts and RMS norms."""

from __future__ import annotations

from typing import Any

from oracles.dense import GRANITE
from oracles.fixture import Fixture
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
    selection_bias,
    wide_norms,
)


@fixture("llama+experts")
def llama_experts(m: Fixture) -> None:
    base(m, 4, **{**EXPERTS, "feed_forward_length": N_FF_EXP})
    for il in range(4):
        attention(m, il)
        mixture(m, il)


@fixture("qwen2moe")
def qwen2moe(m: Fixture) -> None:
    base(m, 4, **EXPERTS, expert_shared_feed_forward_length=48)
    for il in range(4):
        attention(m, il, bias="qkv")
        mixture(m, il)
        feed_forward(m, il, norm="", suffix="_shexp")
        m.put(f"blk.{il}.ffn_gate_inp_shexp.weight", m.normal(f"blk.{il}.shexp", N_EMBD) / 8)


@fixture("qwen3moe")
def qwen3moe(m: Fixture) -> None:
    base(m, 4, **EXPERTS)
    for il in range(4):
        attention(m, il, head_norms=True)
        mixture(m, il)


@fixture("qwen3vlmoe")
def qwen3vlmoe(m: Fixture) -> None:
    base(m, 3, **EXPERTS, rope__dimension_sections=[3, 3, 2, 0])
    for il in range(3):
        attention(m, il, head_norms=True)
        mixture(m, il)


@fixture("glm4moe")
def glm4moe(m: Fixture) -> None:
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
    base(
        m, 5, **EXPERTS, attention__sliding_window=12, rope__scaling__type="yarn", rope__scaling__factor=8.0,
        rope__scaling__original_context_length=64, rope__freq_base=150.0,
    )  # fmt: skip
    for il in range(5):
        p = f"blk.{il}."
        attention(m, il, bias="qkvo")
        m.put(p + "attn_sinks.weight", m.normal(p + "attn_sinks", 4) + 1)
        mixture(m, il, bias=True, norm="post_attention_norm")


@fixture("granitemoe")
def granitemoe(m: Fixture) -> None:
    base(m, 3, **GRANITE, **EXPERTS, feed_forward_length=N_FF_EXP)
    for il in range(3):
        attention(m, il)
        mixture(m, il)


@fixture("granitemoe+shared")
def granitemoe_shared(m: Fixture) -> None:
    base(m, 3, **GRANITE, **EXPERTS, feed_forward_length=N_FF_EXP, expert_shared_feed_forward_length=48)
    for il in range(3):
        attention(m, il)
        mixture(m, il)
        feed_forward(m, il, norm="", suffix="_shexp")


@fixture("ernie4_5-moe")
def ernie4_5_moe(m: Fixture) -> None:
    base(
        m, 4, **EXPERTS, expert_shared_count=1, expert_shared_feed_forward_length=32,
        leading_dense_block_count=1, interleave_moe_layer_step=1,
    )  # fmt: skip
    for il in range(4):
        attention(m, il)
        if il == 0:
            feed_forward(m, il)
            continue
        mixture(m, il)
        selection_bias(m, il)
        feed_forward(m, il, norm="", suffix="_shexp")


@fixture("hunyuan-moe")
def hunyuan_moe(m: Fixture) -> None:
    base(m, 3, **EXPERTS, feed_forward_length=N_FF_EXP, expert_shared_feed_forward_length=32)
    for il in range(3):
        attention(m, il, head_norms=True)
        mixture(m, il)
        feed_forward(m, il, norm="", suffix="_shexp")


@fixture("minimax-m2")
def minimax_m2(m: Fixture) -> None:
    base(
        m, 4, **EXPERTS, rope__dimension_count=HEAD_DIM // 2, expert_gating_func=2,
        feed_forward_length=N_FF_EXP,
    )  # fmt: skip
    for il in range(4):
        attention(m, il)
        wide_norms(m, il)
        mixture(m, il)
        selection_bias(m, il)


def minimax_m3_layers(m: Fixture, n_layer: int, top_k: int) -> None:
    n_index = 16
    base(
        m, n_layer, **EXPERTS, rope__dimension_count=HEAD_DIM // 2, expert_gating_func=2,
        expert_shared_count=1, leading_dense_block_count=1, expert_weights_scale=2.0,
        expert_weights_norm=True, attention__indexer__head_count=2, attention__indexer__key_length=n_index,
        attention__indexer__block_size=8, attention__indexer__top_k=top_k,
        attention__indexer__local_blocks=1,
    )  # fmt: skip
    for il in range(n_layer):
        attention(m, il, head_norms=True)
        if il == 0:
            feed_forward(m, il)
            continue
        mixture(m, il)
        selection_bias(m, il)
        feed_forward(m, il, norm="", suffix="_shexp")
        p = f"blk.{il}.indexer."
        for name, n in (("q", 2 * n_index), ("k", n_index)):
            m.matrix(f"{p}{name}_proj", n, N_EMBD)
            m.norm(f"{p}{name}_norm", n_index)
    m.unread = tuple(f"blk.{il}.indexer." for il in range(1, n_layer))


@fixture("minimax-m3")
def minimax_m3(m: Fixture) -> None:
    """Build a model in which a row attends to three of up to six blocks."""
    m.alone = "llama.cpp attends to all positions"
    minimax_m3_layers(m, 4, 3)


@fixture("minimax-m3+all")
def minimax_m3_all(m: Fixture) -> None:
    """Build a model in which a row attends to all blocks."""
    minimax_m3_layers(m, 2, 8)


def llama4_layers(m: Fixture, n_layer: int, **keys: Any) -> None:
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
    llama4_layers(m, 5)


@fixture("llama4+two")
def llama4_two(m: Fixture) -> None:
    """Build a model with two experts per token."""
    llama4_layers(m, 4)
    m.keys["expert_used_count"] = 2


@fixture("llama4+chunks")
def llama4_chunks(m: Fixture) -> None:
    """Build a model with chunks of 16 positions, in which the attention temperature grows every 16
    positions."""
    m.alone = "llama.cpp has chunks of 8,192 alone"
    llama4_layers(m, 4, attention__sliding_window=16, attention__temperature_length=16)


@fixture("olmoe")
def olmoe(m: Fixture) -> None:
    base(m, 3, n_kv=4, **EXPERTS, feed_forward_length=N_FF_EXP)
    for il in range(3):
        attention(m, il)
        wide_norms(m, il)
        mixture(m, il)


def dense_first(m: Fixture, n_layer: int, **keys: Any) -> None:
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
        selection_bias(m, il)
        feed_forward(m, il, norm="", suffix="_shexp")


@fixture("dots1")
def dots1(m: Fixture) -> None:
    dense_first(m, 3, n_kv=4)


@fixture("exaone-moe")
def exaone_moe(m: Fixture) -> None:
    dense_first(m, 5, attention__sliding_window=16, expert_shared_feed_forward_length=N_FF_EXP)


@fixture("afmoe")
def afmoe(m: Fixture) -> None:
    dense_first(m, 5, attention__sliding_window=16)
    m.tensors["token_embd.weight"] /= 4
    for il in range(5):
        m.matrix(f"blk.{il}.attn_gate", 4 * HEAD_DIM, N_EMBD, gain=2.0)
        for name in ("post_attention_norm", "post_ffw_norm"):
            m.norm(f"blk.{il}.{name}", N_EMBD)
