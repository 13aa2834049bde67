"""Fixtures of further decoders without recurrent layers: deepseek2, gemma, gemma2, granite, granitemoe,
smollm3, exaone4, seed_oss, ernie4_5, ernie4_5-moe, hunyuan-dense, hunyuan-moe, qwen3vl."""

from __future__ import annotations

from typing import Any

import numpy as np
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
)
from oracles.recurrent import LATENT, NOPE, SHARED_KEY, latent_attention


@fixture("gemma")
def gemma(m: Fixture) -> None:
    """One kv head; a tied output matrix."""
    base(m, 3, n_kv=1)
    del m.tensors["output.weight"]
    m.tensors["token_embd.weight"] /= 4
    for il in range(3):
        attention(m, il)
        feed_forward(m, il)


@fixture("gemma2")
def gemma2(m: Fixture) -> None:
    """Two periods of windows; soft-caps low enough to change the logits."""
    base(
        m, 4, attention__sliding_window=16, attn_logit_softcapping=3.0, final_logit_softcapping=4.0,
    )  # fmt: skip
    del m.tensors["output.weight"]
    m.tensors["token_embd.weight"] /= 4
    for il in range(4):
        attention(m, il)
        m.norm(f"blk.{il}.post_attention_norm", N_EMBD)
        feed_forward(m, il)
        m.norm(f"blk.{il}.post_ffw_norm", N_EMBD)


GRANITE = {"embedding_scale": 1.5, "residual_scale": 0.6, "attention__scale": 0.4, "logit_scale": 2.5}


@fixture("granite")
def granite(m: Fixture) -> None:
    base(m, 4, **GRANITE)
    for il in range(4):
        attention(m, il)
        feed_forward(m, il)


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


@fixture("smollm3")
def smollm3(m: Fixture) -> None:
    """One period of four layers and one layer more."""
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


@fixture("ernie4_5-moe")
def ernie4_5_moe(m: Fixture) -> None:
    """A dense layer, then experts and a shared one."""
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
        m.put(f"blk.{il}.exp_probs_b.bias", m.normal(f"blk.{il}.exp_probs_b", 8) / 8)
        feed_forward(m, il, norm="", suffix="_shexp")


@fixture("hunyuan-dense")
def hunyuan_dense(m: Fixture) -> None:
    base(m, 4)
    for il in range(4):
        attention(m, il, head_norms=True)
        feed_forward(m, il)


@fixture("hunyuan-moe")
def hunyuan_moe(m: Fixture) -> None:
    base(m, 3, **EXPERTS, feed_forward_length=N_FF_EXP, expert_shared_feed_forward_length=32)
    for il in range(3):
        attention(m, il, head_norms=True)
        mixture(m, il)
        feed_forward(m, il, norm="", suffix="_shexp")


@fixture("qwen3vl")
def qwen3vl(m: Fixture) -> None:
    base(m, 3, rope__dimension_sections=[3, 3, 2, 0])
    for il in range(3):
        attention(m, il, head_norms=True)
        feed_forward(m, il)


def deepseek2_layers(m: Fixture, n_layer: int) -> None:
    n_head, rank_q = m.keys["attention.head_count"], m.keys.get("attention.q_lora_rank", 0)
    for il in range(n_layer):
        p = f"blk.{il}."
        latent_attention(m, il, n_head)
        if rank_q:
            q = m.tensors.pop(p + "attn_q.weight")
            m.matrix(p + "attn_q_a", rank_q, N_EMBD)
            m.norm(p + "attn_q_a_norm", rank_q)
            m.matrix(p + "attn_q_b", len(q), rank_q, gain=2.0)
        if il == 0:
            feed_forward(m, il)
            continue
        mixture(m, il)
        if m.keys.get("expert_gating_func") == 2:
            m.put(f"{p}exp_probs_b.bias", m.normal(f"{p}exp_probs_b", N_EXPERT) / 8)
        feed_forward(m, il, norm="", suffix="_shexp")


def deepseek2_keys(m: Fixture, n_layer: int, **more: Any) -> None:
    base(
        m, n_layer, n_kv=1, **EXPERTS, expert_shared_count=1, leading_dense_block_count=1,
        expert_shared_feed_forward_length=N_FF_EXP, attention__kv_lora_rank=LATENT,
        attention__key_length=LATENT + SHARED_KEY, attention__value_length=LATENT,
        attention__key_length_mla=NOPE + SHARED_KEY, attention__value_length_mla=HEAD_DIM,
        rope__dimension_count=SHARED_KEY, **more,
    )  # fmt: skip


@fixture("deepseek2")
def deepseek2(m: Fixture) -> None:
    """As V3: q from a latent too, sigmoid, groups, YaRN."""
    deepseek2_keys(
        m, 4, attention__q_lora_rank=24, expert_gating_func=2, expert_weights_scale=2.5,
        expert_weights_norm=True, expert_group_count=4, expert_group_used_count=2,
        rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=64,
        rope__scaling__yarn_log_multiplier=0.1,
    )  # fmt: skip
    deepseek2_layers(m, 4)


@fixture("deepseek2+heads")
def deepseek2_heads(m: Fixture) -> None:
    """As V2 in files from before April 2025: keys and values of full heads."""
    deepseek2_keys(m, 3, attention__q_lora_rank=24, expert_gating_func=1, expert_weights_scale=1.5)
    m.keys |= {
        "attention.head_count_kv": m.keys["attention.head_count"],
        "attention.key_length": m.keys.pop("attention.key_length_mla"),
        "attention.value_length": m.keys.pop("attention.value_length_mla"),
    }
    deepseek2_layers(m, 3)
    for il in range(3):
        k, v = (m.tensors.pop(f"blk.{il}.attn_{name}_b.weight") for name in "kv")
        m.put(f"blk.{il}.attn_kv_b.weight", np.concatenate([k.swapaxes(1, 2), v], 1).reshape(-1, LATENT))


@fixture("deepseek2+softmax")
def deepseek2_softmax(m: Fixture) -> None:
    """As V2: softmax, weights as they are."""
    deepseek2_keys(m, 3, attention__q_lora_rank=24, expert_gating_func=1, expert_weights_scale=1.5)
    deepseek2_layers(m, 3)


def layer_norms(m: Fixture) -> None:
    m.keys["attention.layer_norm_epsilon"] = m.keys.pop("attention.layer_norm_rms_epsilon")


@fixture("cohere2")
def cohere2(m: Fixture) -> None:
    """A period of windows and one layer more; the logits are scaled."""
    base(m, 5, attention__sliding_window=16, logit_scale=0.5)
    layer_norms(m)
    del m.tensors["output.weight"]
    m.tensors["token_embd.weight"] /= 4
    for il in range(5):
        attention(m, il)
        feed_forward(m, il, norm="")


@fixture("command-r")
def command_r(m: Fixture) -> None:
    base(m, 3, logit_scale=0.5)
    layer_norms(m)
    del m.tensors["output.weight"]
    m.tensors["token_embd.weight"] /= 4
    for il in range(3):
        attention(m, il)
        feed_forward(m, il, norm="")


@fixture("starcoder2")
def starcoder2(m: Fixture) -> None:
    base(m, 3)
    layer_norms(m)
    m.bias("output_norm", N_EMBD)
    for il in range(3):
        attention(m, il, bias="qkvo")
        feed_forward(m, il, bias=True)
        del m.tensors[f"blk.{il}.ffn_gate.weight"], m.tensors[f"blk.{il}.ffn_gate.bias"]
        for name in ("attn_norm", "ffn_norm"):
            m.bias(f"blk.{il}.{name}", N_EMBD)
