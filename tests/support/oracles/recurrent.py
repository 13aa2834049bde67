"""Fixtures with gated delta nets (qwen3next, qwen35, kimi-linear), short convolutions (lfm2), and RWKV-7."""

from __future__ import annotations

from typing import Any

import numpy as np
from oracles.fixture import PROMPT, Fixture
from oracles.latent import LATENT, NOPE, SHARED_KEY, latent_attention
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
    fuse_experts,
    mixture,
    selection_bias,
    tied,
)


def delta_net(m: Fixture, il: int) -> tuple[str, int, int]:
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


def qwen35_layers(m: Fixture) -> None:
    for il in range(5):
        if il % 2:
            gated_attention(m, il)
        else:
            p, _, _ = delta_net(m, il)
            m.matrix(p + "ssm_alpha", m.keys["ssm.time_step_rank"], N_EMBD)
            m.matrix(p + "ssm_beta", m.keys["ssm.time_step_rank"], N_EMBD)
        m.norm(f"blk.{il}.post_attention_norm", N_EMBD)


QWEN35: dict[str, Any] = {
    "rope__dimension_count": HEAD_DIM // 2,
    "rope__dimension_sections": [2, 1, 1, 0],
}


@fixture("qwen35")
def qwen35(m: Fixture) -> None:
    """Build a model with tiled value heads, in which value head h reads key head h % 4."""
    base(m, 5, **QWEN35, **ssm(4, 12))
    qwen35_layers(m)
    for il in range(5):
        feed_forward(m, il, norm="")


@fixture("qwen35moe")
def qwen35moe(m: Fixture) -> None:
    base(m, 5, n_kv=1, **QWEN35, **EXPERTS, **ssm(2, 8), expert_shared_feed_forward_length=48)
    qwen35_layers(m)
    for il in range(5):
        gated_mixture(m, il)
        fuse_experts(m, il)


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
    """The text part of a model that reads images, which pairs dimensions otherwise."""
    quarter = SHARED_KEY // 8
    bailingmoe3_layers(m, [0, 1, 1], rope__dimension_sections=[2 * quarter, quarter, quarter, 0])


def lfm2_layers(m: Fixture) -> None:
    base(m, 5, n_kv=[0, 2, 0, 0, 2], shortconv__l_cache=3, **(EXPERTS if m.arch == "lfm2moe" else {}))
    m.tensors["token_embd_norm.weight"] = m.tensors.pop("output_norm.weight")
    tied(m, 0.25)
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
        selection_bias(m, il)
    m.keys["attention.head_count_kv"] = kv_heads


@fixture("lfm2")
def lfm2(m: Fixture) -> None:
    lfm2_layers(m)


@fixture("lfm2moe")
def lfm2moe(m: Fixture) -> None:
    lfm2_layers(m)
    m.keys |= {"leading_dense_block_count": 1, "expert_gating_func": 2}


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


RANKS = {"decay": 8, "iclr": 12, "value_residual_mix": 4, "gate": 16}


def layer_norm(m: Fixture, name: str, n: int) -> None:
    m.norm(name, n)
    m.bias(name, n, scale=0.3)


@fixture("rwkv7")
def rwkv7(m: Fixture) -> None:
    """Three heads of 64. llama.cpp's kernels need multiples of 32 or 64."""
    ranks = {f"attention__{name}_lora_rank": rank for name, rank in RANKS.items()}
    n = 3 * 64
    base(m, 3, n_head=0, n_kv=0, embedding_length=n, **ranks, wkv__head_size=64, token_shift_count=2)
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"):
        del m.keys[key]
    m.keys["attention.layer_norm_epsilon"] = m.keys.pop("attention.layer_norm_rms_epsilon")
    m.bias("output_norm", n, scale=0.3)
    layer_norm(m, "token_embd_norm", n)
    for il in range(3):
        time_mix(m, il, n)
        p, n_ff = f"blk.{il}.channel_mix_", m.keys["feed_forward_length"]
        layer_norm(m, f"blk.{il}.attn_norm_2", n)
        m.put(p + "lerp_k.weight", 0.5 + 0.3 * m.normal(p + "lerp_k", 1, 1, n))
        m.matrix(p + "key", n_ff, n)
        m.matrix(p + "value", n, n_ff)
    m.unread = ("blk.0.time_mix_v0", "blk.0.time_mix_v1", "blk.0.time_mix_v2")


def time_mix(m: Fixture, il: int, n: int) -> None:
    p = f"blk.{il}.time_mix_"
    layer_norm(m, f"blk.{il}.attn_norm", n)
    m.put(p + "lerp_fused.weight", 0.5 + 0.3 * m.normal(p + "lerp_fused", 6, 1, 1, n))
    for name in ("receptance", "key", "value", "output"):
        m.matrix(p + name, n, n)
    for name, rank in zip("wavg", RANKS.values(), strict=True):
        rank = RANKS["iclr"] if name == "v" and il == 0 else rank  # the file's, which nothing reads
        if name != "g":
            m.put(f"{p}{name}0.weight", m.normal(f"{p}{name}0", n))
        m.matrix(f"{p}{name}1", rank, n, gain=1.5)
        m.matrix(f"{p}{name}2", n, rank, gain=1.5)
    for name in ("k_k", "k_a", "r_k"):
        m.put(f"{p}{name}.weight", 1 + 0.3 * m.normal(p + name, n))
    layer_norm(m, p + "ln", n)


@fixture("qwen4exp")
def qwen4exp(m: Fixture) -> None:
    """Build a model in which a row attends to two of up to twelve blocks and to its own incomplete block. Its
    third layer adds embeddings of n-grams, and the prompt contains an end of text."""
    n_layer, m_stream, rank, n_index, index, block = 5, 3, 12, 4, 16, 4
    wide, sizes = m_stream * N_EMBD, [53, 59, 61, 67]
    base(
        m, n_layer, n_kv=2, **QWEN35, **EXPERTS, **ssm(2, 8), expert_shared_feed_forward_length=48,
        attention__indexer__head_count=n_index, attention__indexer__key_length=index,
        attention__indexer__top_k=2 * block, attention__compress_ratios=[0, block] * 2 + [0],
        hyper_connection__count=m_stream, hyper_connection__low_rank=rank, ple__layers=[2],
        ple__ngram_size=3, ple__heads_per_ngram=2, ple__conv_kernel=4, ple__eos_token_id=PROMPT[20],
        ple__layer_multipliers=[0x71234567890BCD, 0x3FEDCBA9876543, 0x5A5A5A5A5A5A5B],
        ple__head_vocab_sizes=sizes, ple__head_offsets=[0, 53, 112, 173],
        embedding_length_per_layer_input=N_EMBD // len(sizes),
    )  # fmt: skip
    del m.tensors["output_norm.weight"]
    m.matrix("per_layer_token_embd", sum(sizes), N_EMBD // len(sizes), gain=4.0)
    qwen35_layers(m)

    def streams(name: str, last: bool = False) -> None:
        m.norm(f"{name}_norm", wide)
        m.matrix(f"{name}_down", rank, wide, gain=3.0)
        m.matrix(f"{name}_up", wide, rank, gain=2.0)
        if not last:
            m.matrix(f"{name}_inject", m_stream, wide, gain=3.0)

    streams("output_hc", last=True)
    for il in range(n_layer):
        p = f"blk.{il}."
        for name in ("attn_norm", "post_attention_norm"):
            del m.tensors[f"{p}{name}.weight"]
        streams(p + "hc_attn")
        streams(p + "hc_ffn")
        gated_mixture(m, il)
        fuse_experts(m, il)
        if il % 2:
            for name, n in (("q", n_index * index), ("k", index)):
                m.matrix(f"{p}indexer.{name}_proj", n, N_EMBD)
                m.norm(f"{p}indexer.{name}_norm", index)
    m.matrix("blk.2.ple_key", wide, N_EMBD)
    m.matrix("blk.2.ple_value", N_EMBD, N_EMBD)
    for name in ("key", "query", "conv"):
        m.norm(f"blk.2.ple_norm_{name}", wide)
    m.put("blk.2.ple_conv1d.weight", 0.6 * m.normal("blk.2.ple_conv1d", wide, 4))
    m.unsteered = tuple(range(n_layer))
