"""Fixtures with gated delta nets (qwen3next, qwen35, qwen4exp), short convolutions (lfm2), and RWKV-7."""

from __future__ import annotations

from typing import Any

import numpy as np
from oracles.fixture import PROMPT, Fixture
from oracles.parts import (
    EXPERTS,
    HEAD_DIM,
    N_EMBD,
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
        # the rank in the file, although no program reads this tensor
        rank = RANKS["iclr"] if name == "v" and il == 0 else rank
        if name != "g":
            m.put(f"{p}{name}0.weight", m.normal(f"{p}{name}0", n))
        m.matrix(f"{p}{name}1", rank, n, gain=1.5)
        m.matrix(f"{p}{name}2", n, rank, gain=1.5)
    for name in ("k_k", "k_a", "r_k"):
        m.put(f"{p}{name}.weight", 1 + 0.3 * m.normal(p + name, n))
    layer_norm(m, p + "ln", n)


@fixture("qwen4exp")
def qwen4exp(m: Fixture) -> None:
    """Build a model in which a row attends to two of up to twelve blocks and to its own incomplete block. The
    model's third layer adds embeddings of n-grams, and the prompt contains an end-of-text token."""
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
