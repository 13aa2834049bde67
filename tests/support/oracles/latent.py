"""Fixtures with latent attention (MLA), with and without an indexer."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np
from oracles.fixture import N_VOCAB, Fixture
from oracles.parts import (
    EXPERTS,
    HEAD_DIM,
    N_EMBD,
    N_EXPERT,
    N_FF_EXP,
    base,
    feed_forward,
    fixture,
    mixture,
    selection_bias,
)

LATENT, NOPE, SHARED_KEY = 32, 16, 8


def latent_attention(m: Fixture, il: int, n_head: int) -> None:
    p = f"blk.{il}."
    m.norm(p + "attn_norm", N_EMBD)
    m.matrix(p + "attn_q", n_head * (NOPE + SHARED_KEY), N_EMBD, gain=2.0)
    m.matrix(p + "attn_kv_a_mqa", LATENT + SHARED_KEY, N_EMBD)
    m.norm(p + "attn_kv_a_norm", LATENT)
    m.matrix(p + "attn_k_b", n_head, LATENT, NOPE, gain=sqrt(NOPE / LATENT))
    m.matrix(p + "attn_v_b", n_head, HEAD_DIM, LATENT)
    m.matrix(p + "attn_output", N_EMBD, n_head * HEAD_DIM, gain=1.5)


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
            selection_bias(m, il)
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
    """Build a model like DeepSeek V3, with q from a latent, sigmoid routing, groups of experts, and YaRN."""
    deepseek2_keys(
        m, 4, attention__q_lora_rank=24, expert_gating_func=2, expert_weights_scale=2.5,
        expert_weights_norm=True, expert_group_count=4, expert_group_used_count=2,
        rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=64,
        rope__scaling__yarn_log_multiplier=0.1,
    )  # fmt: skip
    deepseek2_layers(m, 4)


@fixture("deepseek2+heads")
def deepseek2_heads(m: Fixture) -> None:
    """Build a model like DeepSeek V2 in files from before April 2025, where every head has its own keys and
    values."""
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
    """Build a model like DeepSeek V2, with softmax routing and expert weights that are not normalised."""
    deepseek2_keys(m, 3, attention__q_lora_rank=24, expert_gating_func=1, expert_weights_scale=1.5)
    deepseek2_layers(m, 3)


@fixture("minicpm3")
def minicpm3(m: Fixture) -> None:
    """Build a model whose file lacks muP's factors, so the program must know these factors."""
    n_head = 4
    base(
        m, 3, n_kv=n_head, attention__q_lora_rank=24, attention__kv_lora_rank=LATENT,
        attention__key_length=NOPE + SHARED_KEY, attention__value_length=HEAD_DIM,
        rope__dimension_count=SHARED_KEY,
    )  # fmt: skip
    m.tensors["token_embd.weight"] /= 12
    for il in range(3):
        p = f"blk.{il}."
        latent_attention(m, il, n_head)
        del m.tensors[p + "attn_q.weight"]
        m.matrix(p + "attn_q_a", 24, N_EMBD)
        m.norm(p + "attn_q_a_norm", 24)
        m.matrix(p + "attn_q_b", n_head * (NOPE + SHARED_KEY), 24, gain=2.0)
        k, v = (m.tensors.pop(f"{p}attn_{name}_b.weight") for name in "kv")
        m.put(p + "attn_kv_b.weight", np.concatenate([k.swapaxes(1, 2), v], 1).reshape(-1, LATENT))
        feed_forward(m, il)


@fixture("mistral4")
def mistral4(m: Fixture) -> None:
    deepseek2_keys(
        m, 3, attention__q_lora_rank=24, expert_gating_func=1, expert_weights_scale=1.5,
        expert_weights_norm=True, rope__scaling__type="yarn", rope__scaling__factor=4.0,
        rope__scaling__original_context_length=16, rope__scaling__yarn_log_multiplier=0.1,
        attention__temperature_scale=0.5, attention__temperature_length=16,
    )  # fmt: skip
    deepseek2_layers(m, 3)


# In every row, the last chosen score exceeds the next score by at least 1e-4 of the largest score. The margin
# of 1e-4 is 100 times F32's error. With eight index heads, few scores are 0.
TOP_K, N_INDEX = 19, 8


INDEX_DIM = 64  # llama.cpp's Hadamard matrix for index keys has at least this size


RANK_Q = 24


def indexer(m: Fixture, il: int) -> None:
    p = f"blk.{il}.indexer."
    m.matrix(p + "attn_q_b", N_INDEX * INDEX_DIM, RANK_Q)
    m.matrix(p + "attn_k", INDEX_DIM, N_EMBD)
    m.norm(p + "k_norm", INDEX_DIM)
    m.bias(p + "k_norm", INDEX_DIM)
    m.matrix(p + "proj", N_INDEX, N_EMBD)


def sparse_keys(m: Fixture, n_layer: int, **more: Any) -> None:
    deepseek2_keys(
        m, n_layer, attention__q_lora_rank=RANK_Q, expert_gating_func=2, expert_weights_scale=2.5,
        expert_weights_norm=True, attention__indexer__head_count=N_INDEX,
        attention__indexer__key_length=INDEX_DIM, attention__indexer__top_k=TOP_K, **more,
    )  # fmt: skip


@fixture("deepseek32")
def deepseek32(m: Fixture) -> None:
    sparse_keys(
        m, 4, expert_group_count=4, expert_group_used_count=2, rope__scaling__type="yarn",
        rope__scaling__factor=4.0, rope__scaling__original_context_length=64,
        rope__scaling__yarn_log_multiplier=0.1,
    )  # fmt: skip
    deepseek2_layers(m, 4)
    for il in range(4):
        indexer(m, il)


@fixture("glm-dsa")
def glm_dsa(m: Fixture) -> None:
    sparse_keys(m, 3)
    deepseek2_layers(m, 3)
    for il in range(3):
        indexer(m, il)


@fixture("glm-dsa+shared")
def glm_dsa_shared(m: Fixture) -> None:
    """Build a model like GLM-5.2, in which two layers use the positions that an earlier layer chose."""
    full = [True, True, False, False, True]
    sparse_keys(m, len(full), attention__indexer__types=full)
    deepseek2_layers(m, len(full))
    for il, has in enumerate(full):
        if has:
            indexer(m, il)


@fixture("hy_v4")
def hy_v4(m: Fixture) -> None:
    """Build a model in which the third layer uses the positions that the second layer chose."""
    full, n_head, n_stream = [True, True, False, True], 4, 3
    sparse_keys(
        m, len(full), attention__indexer__types=full, hyper_connection__count=n_stream,
        hyper_connection__epsilon=1e-6, hyper_connection__magnitude=2.0, swiglu_clamp_exp=[0.7] * len(full),
    )  # fmt: skip
    deepseek2_layers(m, len(full))
    m.unsteered = tuple(range(len(full)))

    def streams(name: str, parts: int) -> None:
        m.matrix(f"{name}_fn", parts * n_stream, n_stream * N_EMBD)
        m.put(f"{name}_base.weight", m.normal(f"{name}_base", parts * n_stream))
        m.put(f"{name}_scale.weight", 1 + m.normal(f"{name}_scale", parts) / 4)

    streams("output_hc", 1)
    for il, has in enumerate(full):
        p = f"blk.{il}."
        streams(p + "hc_attn", 2)
        streams(p + "hc_ffn", 2)
        m.put(p + "attn_sinks.weight", m.normal(p + "attn_sinks", n_head) + 1)
        m.matrix(p + "attn_gate", n_head * HEAD_DIM, N_EMBD, gain=2.0)
        if has:
            indexer(m, il)


def deepseek4_layers(m: Fixture, ratios: list[int], n_hashed: int = 2) -> None:
    """Build layers with windows of 12 positions and up to five chosen entries per row."""
    n_head, n_group, rank_o, rank_q, n_index, index, n_stream = 8, 4, 16, 24, 4, 64, 4
    n_layer, size = len(ratios), 32
    base(
        m, n_layer, n_head=n_head, n_kv=1, **EXPERTS, expert_shared_count=1, expert_gating_func=4,
        expert_weights_scale=1.5, expert_weights_norm=True, attention__key_length=size,
        attention__value_length=size, rope__dimension_count=8, rope__scaling__type="yarn",
        rope__scaling__factor=4.0, rope__scaling__original_context_length=64, attention__q_lora_rank=rank_q,
        attention__output_group_count=n_group, attention__output_lora_rank=rank_o,
        attention__sliding_window=12, attention__compress_ratios=ratios,
        attention__compress_rope_freq_base=5000.0, attention__indexer__head_count=n_index,
        attention__indexer__key_length=index, attention__indexer__top_k=5, hyper_connection__count=n_stream,
        hyper_connection__sinkhorn_iterations=5, hyper_connection__epsilon=1e-6, hash_layer_count=n_hashed,
        swiglu_clamp_exp=[0.7] * n_layer,
    )  # fmt: skip
    m.matrix("output_hc_fn", n_stream, n_stream * N_EMBD)
    m.put("output_hc_base.weight", m.normal("output_hc_base", n_stream))
    m.put("output_hc_scale.weight", 3 + m.normal("output_hc_scale", 1) / 4)
    for il, ratio in enumerate(ratios):
        p = f"blk.{il}."
        m.norm(p + "attn_norm", N_EMBD)
        m.matrix(p + "attn_q_a", rank_q, N_EMBD)
        m.norm(p + "attn_q_a_norm", rank_q)
        m.matrix(p + "attn_q_b", n_head * size, rank_q)
        m.matrix(p + "attn_kv", size, N_EMBD)
        m.norm(p + "attn_kv_a_norm", size)
        m.put(p + "attn_sinks.weight", m.normal(p + "attn_sinks", n_head))
        m.matrix(p + "attn_output_a", n_group * rank_o, n_head // n_group * size, gain=2.0)
        m.matrix(p + "attn_output_b", N_EMBD, n_group * rank_o, gain=2.0)
        for name in ("hc_attn", "hc_ffn"):
            n = (2 + n_stream) * n_stream
            m.matrix(f"{p}{name}_fn", n, n_stream * N_EMBD)
            m.put(f"{p}{name}_base.weight", m.normal(f"{p}{name}_base", n))
            m.put(f"{p}{name}_scale.weight", 2 + m.normal(f"{p}{name}_scale", 3) / 4)
        pools = [("attn_compressor", size), ("indexer_compressor", index)]
        for name, n in pools[: 0 if not ratio else 2 if ratio == 4 else 1]:
            wide = n * (2 if ratio == 4 else 1)
            m.matrix(f"{p}{name}_kv", wide, N_EMBD)
            m.matrix(f"{p}{name}_gate", wide, N_EMBD, gain=2.0)
            m.put(f"{p}{name}_ape.weight", m.normal(f"{p}{name}_ape", ratio, wide))
            m.norm(f"{p}{name}_norm", n)
        if ratio == 4:
            m.matrix(p + "indexer.attn_q_b", n_index * index, rank_q)
            m.matrix(p + "indexer.proj", n_index, N_EMBD)
        mixture(m, il)
        if il < n_hashed:
            rng = np.random.default_rng(il)
            ids = [rng.permutation(N_EXPERT)[: m.keys["expert_used_count"]] for _ in range(N_VOCAB)]
            m.tensors[p + "ffn_gate_tid2eid.weight"] = np.stack(ids).astype(np.int32)
        else:
            selection_bias(m, il)
        feed_forward(m, il, norm="", suffix="_shexp")


@fixture("deepseek4")
def deepseek4(m: Fixture) -> None:
    """Build a model whose blocks of 128 positions are longer than the prompt, because llama.cpp has no other
    size of long blocks."""
    deepseek4_layers(m, [0, 4, 128, 4])
    m.unread = ("blk.2.attn_compressor",)


@fixture("deepseek4+short")
def deepseek4_short(m: Fixture) -> None:
    deepseek4_layers(m, [8, 4, 8, 0])
    m.alone = "llama.cpp refuses blocks of 8 positions"
