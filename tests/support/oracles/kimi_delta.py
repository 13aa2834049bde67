"""Fixtures with Kimi Delta Attention and latent attention: kimi-linear, kimi-k3, bailingmoe3, glm5-next."""

from __future__ import annotations

from typing import Any

import numpy as np
from oracles.fixture import Fixture
from oracles.latent import LATENT, NOPE, SHARED_KEY, latent_attention
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

KDA_SIZE = 16


@fixture("kimi-linear")
def kimi_linear(m: Fixture) -> None:
    n_head = 4
    base(
        m, 5, n_kv=[0, 1, 0, 1, 0], **EXPERTS, expert_shared_count=1, leading_dense_block_count=1,
        expert_gating_func=2, expert_weights_scale=2.5, ssm__conv_kernel=4, kda__head_dim=KDA_SIZE,
        attention__kv_lora_rank=LATENT, attention__key_length=LATENT + SHARED_KEY,
        attention__key_length_mla=NOPE + SHARED_KEY, attention__value_length_mla=HEAD_DIM,
        rope__dimension_count=SHARED_KEY,
    )  # fmt: skip
    del m.keys["attention.value_length"]
    for il in range(5):
        (latent_attention if il % 2 else kimi_delta)(m, il, n_head)
        if il == 0:
            feed_forward(m, il)
            continue
        mixture(m, il)
        m.bias(f"blk.{il}.exp_probs_b", N_EXPERT)
        feed_forward(m, il, norm="", suffix="_shexp")


def kimi_delta(m: Fixture, il: int, n_head: int) -> None:
    p, width = f"blk.{il}.", n_head * KDA_SIZE
    m.norm(p + "attn_norm", N_EMBD)
    for name in "qkv":
        m.matrix(f"{p}attn_{name}", width, N_EMBD)
        m.put(f"{p}ssm_conv1d_{name}.weight", 0.6 * m.normal(f"{p}ssm_conv1d_{name}", 1, width, 1, 4))
    for name in ("ssm_f", "ssm_g"):
        m.matrix(f"{p}{name}_a", KDA_SIZE, N_EMBD)
        m.matrix(f"{p}{name}_b", width, KDA_SIZE)
    m.matrix(p + "ssm_beta", n_head, N_EMBD)
    m.put(p + "ssm_a", -np.exp(0.7 * m.normal(p + "ssm_a", 1, 1, n_head, 1) - 1.5))
    m.bias(p + "ssm_dt", width)
    m.norm(p + "ssm_norm", KDA_SIZE)
    m.matrix(p + "attn_output", N_EMBD, width, gain=1.5)


@fixture("kimi-k3")
def kimi_k3(m: Fixture) -> None:
    """Build a model that keeps the inputs of layers 0, 2 and 4."""
    n_head, n_kv, latent = 4, [0, 1, 0, 1, 0], 48
    base(
        m, len(n_kv), n_kv=n_kv, **EXPERTS, expert_shared_count=2, leading_dense_block_count=1,
        expert_gating_func=2, expert_weights_scale=2.5, expert_weights_norm=True, expert_latent_length=latent,
        ssm__conv_kernel=4, kda__head_dim=KDA_SIZE, kda__gate_lower_bound=-5.0, attn_res__block_size=2,
        activation__situ_beta=2.0, activation__situ_linear_beta=1.5, attention__q_lora_rank=24,
        attention__kv_lora_rank=LATENT, attention__key_length=LATENT + SHARED_KEY,
        attention__value_length=LATENT, attention__key_length_mla=NOPE + SHARED_KEY,
        attention__value_length_mla=HEAD_DIM, rope__dimension_count=SHARED_KEY,
    )  # fmt: skip
    m.put("output_res_score.weight", m.normal("output_res_score", N_EMBD) / 4)
    for il, attends in enumerate(n_kv):
        p, width = f"blk.{il}.", n_head * KDA_SIZE
        if attends:
            latent_attention(m, il, n_head)
            q = m.tensors.pop(p + "attn_q.weight")
            m.matrix(p + "attn_q_a", 24, N_EMBD)
            m.norm(p + "attn_q_a_norm", 24)
            m.matrix(p + "attn_q_b", len(q), 24, gain=2.0)
            m.matrix(p + "attn_gate", n_head * HEAD_DIM, N_EMBD, gain=2.0)
        else:
            kimi_delta(m, il, n_head)
            m.put(p + "ssm_a", 4 * m.tensors.pop(p + "ssm_a").reshape(n_head))
            m.tensors[p + "ssm_dt.bias"] *= 2
            del m.tensors[p + "ssm_g_a.weight"], m.tensors[p + "ssm_g_b.weight"]
            m.matrix(p + "ssm_g", width, N_EMBD)
        for name in ("attn_res_score", "ffn_res_score"):
            m.put(f"{p}{name}.weight", m.normal(p + name, N_EMBD) / 4)
        if il == 0:
            feed_forward(m, il)
            continue
        mixture(m, il)
        selection_bias(m, il)
        m.matrix(p + "ffn_routed_down", latent, N_EMBD)
        m.norm(p + "ffn_routed_norm", latent)
        m.matrix(p + "ffn_routed_up", N_EMBD, latent)
        for name, *shape in (
            ("gate", N_FF_EXP, latent),
            ("up", N_FF_EXP, latent),
            ("down", latent, N_FF_EXP),
        ):
            del m.tensors[f"{p}ffn_{name}_exps.weight"]
            m.matrix(f"{p}ffn_{name}_exps", N_EXPERT, *shape, gain=2.0)
        for name, *shape in (("gate", 64, N_EMBD), ("up", 64, N_EMBD), ("down", N_EMBD, 64)):
            m.matrix(f"{p}ffn_{name}_shexp", *shape)
    m.unread = ("blk.0.attn_res_score",)  # layer 0 has no kept inputs


def bailingmoe3_layers(m: Fixture, n_kv: list[int], **more: Any) -> None:
    n_head, n_layer = 4, len(n_kv)
    base(
        m, n_layer, n_kv=n_kv, **EXPERTS, expert_shared_count=1, leading_dense_block_count=1,
        expert_shared_feed_forward_length=32, expert_gating_func=2, expert_weights_scale=2.5,
        expert_weights_norm=True, expert_group_count=4, expert_group_used_count=2, ssm__conv_kernel=4,
        kda__head_dim=KDA_SIZE, kda__safe_gate=True, kda__gate_lower_bound=-5.0,
        attention__kv_lora_rank=LATENT, attention__key_length=LATENT + SHARED_KEY,
        attention__key_length_mla=NOPE + SHARED_KEY, attention__value_length_mla=HEAD_DIM,
        rope__dimension_count=SHARED_KEY, nextn_predict_layers=1, **more,
    )  # fmt: skip
    del m.keys["attention.value_length"]
    for il, latent in enumerate(n_kv):
        p, width = f"blk.{il}.", n_head * KDA_SIZE
        if latent:
            latent_attention(m, il, n_head)
            m.matrix(p + "attn_gate", n_head, N_EMBD, gain=2.0)
        else:
            kimi_delta(m, il, n_head)
            m.put(p + "ssm_a", -4 * m.tensors.pop(p + "ssm_a").reshape(n_head, 1))
            m.tensors[p + "ssm_dt.bias"] *= 2
            for name in ("ssm_f", "ssm_g"):
                del m.tensors[f"{p}{name}_a.weight"], m.tensors[f"{p}{name}_b.weight"]
                m.matrix(f"{p}{name}_a", width, N_EMBD)
        if il == 0:
            feed_forward(m, il)
            continue
        mixture(m, il)
        selection_bias(m, il)
        feed_forward(m, il, norm="", suffix="_shexp")
    m.unread = (f"blk.{n_layer - 1}.",)
    m.matrix(f"blk.{n_layer - 1}.nextn.eh_proj", N_EMBD, 2 * N_EMBD)
    for name in ("nextn.enorm", "nextn.hnorm", "layer_output_norm"):
        m.norm(f"blk.{n_layer - 1}.{name}", N_EMBD)


@fixture("bailingmoe3")
def bailingmoe3(m: Fixture) -> None:
    bailingmoe3_layers(m, [0, 0, 1, 0, 1])


@fixture("bailingmoe3+limits")
def bailingmoe3_limits(m: Fixture) -> None:
    limits = {"swiglu_clamp_exp": [0.0, 0.25, 0.5, 0.0], "swiglu_clamp_shexp": [0.0, 0.0, 0.5, 0.0]}
    bailingmoe3_layers(m, [0, 0, 1, 1], **limits)


@fixture("bailingmoe3+sections")
def bailingmoe3_sections(m: Fixture) -> None:
    """The text model of a model that reads images. RoPE has sections in this model, and pairs dimensions
    differently."""
    quarter = SHARED_KEY // 8
    bailingmoe3_layers(m, [0, 1, 1], rope__dimension_sections=[2 * quarter, quarter, quarter, 0])


GLM5_KINDS = [0, 1, 1, 0, 1]  # kv heads: 0 in delta nets, 1 in latent attention


GLM5_INDEXED = [True, True, False, True, True]


@fixture("glm5-next")
def glm5_next(m: Fixture) -> None:
    """Build a model in which a row attends to two of up to twelve blocks, and to its own incomplete block.
    The third layer uses the blocks that the second layer chose."""
    n_head, n_stream, rank_q, n_index, index, pool = 4, 4, 24, 8, 32, 4
    n_layer = len(GLM5_KINDS)
    base(
        m, n_layer, n_kv=GLM5_KINDS, **EXPERTS, expert_shared_count=1, leading_dense_block_count=1,
        expert_gating_func=2, expert_weights_scale=2.5, expert_weights_norm=True, ssm__conv_kernel=4,
        kda__head_dim=KDA_SIZE, kda__gate_lower_bound=-5.0, attention__kv_lora_rank=LATENT,
        attention__q_lora_rank=rank_q, attention__key_length=LATENT, attention__value_length=LATENT,
        attention__key_length_mla=NOPE, attention__value_length_mla=HEAD_DIM, rope__dimension_count=0,
        attention__indexer__head_count=n_index, attention__indexer__key_length=index,
        attention__indexer__top_k=2 * pool, attention__indexer__kpool=pool,
        attention__indexer__kpool_select_tail=True, attention__indexer__types=GLM5_INDEXED,
        attention__layer_norm_epsilon=1e-6, hyper_connection__count=n_stream,
        hyper_connection__sinkhorn_iterations=5, hyper_connection__epsilon=1e-6,
        swiglu_clamp_exp=[0.7] * n_layer,
    )  # fmt: skip
    for il, n_kv in enumerate(GLM5_KINDS):
        p = f"blk.{il}."
        if n_kv:
            latent_without_rope(m, il, n_head, rank_q)
        else:
            kimi_delta(m, il, n_head)
            m.put(p + "ssm_a", m.tensors.pop(p + "ssm_a").reshape(-1))
        for name in ("hc_attn", "hc_ffn"):
            n = (2 + n_stream) * n_stream
            m.matrix(f"{p}{name}_fn", n, n_stream * N_EMBD)
            m.put(f"{p}{name}_base.weight", m.normal(f"{p}{name}_base", n))
            m.put(f"{p}{name}_scale.weight", 1 + m.normal(f"{p}{name}_scale", 3) / 4)
        if n_kv and GLM5_INDEXED[il]:
            m.matrix(p + "indexer.attn_q_b", n_index * index, rank_q)
            m.matrix(p + "indexer.attn_k", index, N_EMBD)
            m.norm(p + "indexer.k_norm", index)
            m.bias(p + "indexer.k_norm", index)
            m.matrix(p + "indexer.proj", n_index, N_EMBD)
            m.matrix(p + "indexer_compressor_gate", index, N_EMBD, gain=2.0)
            m.put(p + "indexer_compressor_ape.weight", m.normal(p + "indexer_compressor_ape", pool, index))
        if il == 0:
            feed_forward(m, il)
            continue
        mixture(m, il)
        selection_bias(m, il)
        feed_forward(m, il, norm="", suffix="_shexp")


def latent_without_rope(m: Fixture, il: int, n_head: int, rank_q: int) -> None:
    p = f"blk.{il}."
    m.norm(p + "attn_norm", N_EMBD)
    m.matrix(p + "attn_q_a", rank_q, N_EMBD)
    m.norm(p + "attn_q_a_norm", rank_q)
    m.matrix(p + "attn_q_b", n_head * NOPE, rank_q, gain=2.0)
    m.matrix(p + "attn_kv_a_mqa", LATENT, N_EMBD)
    m.norm(p + "attn_kv_a_norm", LATENT)
    m.matrix(p + "attn_k_b", n_head, LATENT, NOPE)
    m.matrix(p + "attn_v_b", n_head, HEAD_DIM, LATENT)
    m.matrix(p + "attn_output", N_EMBD, n_head * HEAD_DIM, gain=1.5)
