"""Fixtures of Gemma: gemma to gemma4."""

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
    N_FF,
    attention,
    base,
    feed_forward,
    fixture,
    fuse_experts,
    mixture,
    tied,
)


@fixture("gemma")
def gemma(m: Fixture) -> None:
    base(m, 3, n_kv=1)
    tied(m, 0.25)
    for il in range(3):
        attention(m, il)
        feed_forward(m, il)


@fixture("gemma2")
def gemma2(m: Fixture) -> None:
    base(
        m, 4, attention__sliding_window=16, attn_logit_softcapping=3.0, final_logit_softcapping=4.0,
    )  # fmt: skip
    tied(m, 0.25)
    for il in range(4):
        attention(m, il)
        m.norm(f"blk.{il}.post_attention_norm", N_EMBD)
        feed_forward(m, il)
        m.norm(f"blk.{il}.post_ffw_norm", N_EMBD)


@fixture("gemma3")
def gemma3(m: Fixture) -> None:
    base(
        m, 7, n_kv=1, attention__sliding_window=12, rope__freq_base=20000.0, rope__scaling__type="linear",
        rope__scaling__factor=4.0, final_logit_softcapping=4.0,
    )  # fmt: skip
    m.keys["rope.freq_base_swa"] = 500.0
    tied(m, 0.2)
    for il in range(7):
        attention(m, il, head_norms=True)
        m.norm(f"blk.{il}.post_attention_norm", N_EMBD)
        feed_forward(m, il)
        m.norm(f"blk.{il}.post_ffw_norm", N_EMBD)


N_SHARED, SIZE, RANK = 5, 256, 64


SPARSE = 10


CUT = 1.6448533535003662  # the quantile of 0.95


@fixture("gemma3n")
def gemma3n(m: Fixture) -> None:
    """Build a model with four residual streams. The last five of 25 layers read the caches of the two layers
    before them. llama.cpp's standard deviation divides by n - 1, but the model's divides by n. The threshold
    of the gates compensates for this difference."""
    n_layer, n = 20 + N_SHARED, N_EMBD
    base(
        m, n_layer, attention__sliding_window=12, rope__freq_base=20000.0, rope__freq_base_swa=500.0,
        attention__shared_kv_layers=N_SHARED, embedding_length_per_layer_input=SIZE, altup__num_inputs=4,
        altup__active_idx=0,
    )  # fmt: skip
    cut = CUT * sqrt(N_FF / (N_FF - 1))
    m.keys["activation_sparsity_scale"] = [cut] * SPARSE + [-np.inf] * (n_layer - SPARSE)
    tied(m, 0.2)
    m.matrix("per_layer_token_embd", N_VOCAB, n_layer * SIZE, gain=sqrt(n_layer))
    m.matrix("per_layer_model_proj", n_layer * SIZE, n)
    m.norm("per_layer_proj_norm", SIZE)
    for name in ("altup_proj", "altup_unembd_proj"):
        m.matrix(name, 3, n, n)
    for il in range(n_layer):
        p = f"blk.{il}."
        attention(m, il, head_norms=True)
        for name in ("attn_q_norm", "attn_k_norm"):
            m.tensors[f"{p}{name}.weight"] *= np.float32(0.4)
        feed_forward(m, il)
        m.matrix(p + "inp_gate", SIZE, n)
        m.matrix(p + "proj", n, SIZE)
        m.matrix(p + "altup_router", 4, n, gain=float(n))
        m.matrix(p + "altup_predict_coef", 16, 4, gain=0.15)
        m.matrix(p + "altup_correct_coef", 4, 4, gain=0.3)
        m.matrix(p + "laurel_l", RANK, n)
        m.matrix(p + "laurel_r", n, RANK)
        for name in ("post_attention_norm", "post_ffw_norm", "post_norm", "laurel_post_norm"):
            m.norm(p + name, n)  # the norms are small, because 25 layers amplify GELU's error
            m.tensors[f"{p}{name}.weight"] *= np.float32(0.3)
        for name in ("altup_router_norm", "altup_correct_scale"):
            m.norm(p + name, n)
    m.unread = tuple(f"blk.{il}.attn_{end}" for il in range(20, n_layer) for end in ("k", "v"))


def gemma4_base(m: Fixture, windowed: list[bool], n_kv: int, n_kv_full: int, **keys: Any) -> None:
    """Add the keys and tensors of gemma4. Heads have 16 elements in layers with a window, and 32 elements in
    other layers. In these layers RoPE rotates a quarter of the elements."""
    base(
        m, len(windowed), n_kv=[n_kv if swa else n_kv_full for swa in windowed],
        attention__sliding_window=12, attention__sliding_window_pattern=windowed,
        attention__key_length=2 * HEAD_DIM, attention__value_length=2 * HEAD_DIM,
        attention__key_length_swa=HEAD_DIM, attention__value_length_swa=HEAD_DIM,
        attention__shared_kv_layers=0, embedding_length_per_layer_input=0, rope__freq_base=20000.0,
        rope__freq_base_swa=500.0, rope__dimension_count=2 * HEAD_DIM, rope__dimension_count_swa=HEAD_DIM,
        final_logit_softcapping=4.0,
    )  # fmt: skip
    m.keys |= keys
    m.unread = (f"blk.{len(windowed) - 1}.layer_output_scale",)  # the final norm cancels this scale
    tied(m, 0.2)
    m.put("rope_freqs.weight", np.array([1.0] * (HEAD_DIM // 4) + [1e30] * (HEAD_DIM * 3 // 4)))


def gemma4_attention(m: Fixture, il: int, values: bool = True) -> None:
    p, k = f"blk.{il}.", m.keys
    windowed = k["attention.sliding_window_pattern"][il]
    size = k["attention.key_length_swa" if windowed else "attention.key_length"]
    n_head, n_kv = k["attention.head_count"], k["attention.head_count_kv"][il]
    m.norm(p + "attn_norm", N_EMBD)
    m.matrix(p + "attn_q", n_head * size, N_EMBD)
    m.matrix(p + "attn_k", n_kv * size, N_EMBD)
    if values:
        m.matrix(p + "attn_v", n_kv * size, N_EMBD)
    m.matrix(p + "attn_output", N_EMBD, n_head * size)
    for name in ("attn_q_norm", "attn_k_norm"):
        m.norm(p + name, size)
        m.tensors[f"{p}{name}.weight"] *= np.float32(0.4)
    m.norm(p + "post_attention_norm", N_EMBD)
    m.put(p + "layer_output_scale.weight", np.array([1.5 if il % 2 else 0.5 + 0.06 * il]))


def gemma4_feed_forward(m: Fixture, il: int, n_ff: int) -> None:
    p = f"blk.{il}."
    m.norm(p + "ffn_norm", N_EMBD)
    m.matrix(p + "ffn_gate", n_ff, N_EMBD)
    m.matrix(p + "ffn_up", n_ff, N_EMBD)
    m.matrix(p + "ffn_down", N_EMBD, n_ff, gain=2.0)
    m.norm(p + "post_ffw_norm", N_EMBD)


@fixture("gemma4")
def gemma4(m: Fixture) -> None:
    gemma4_base(m, [True, True, False] * 2 + [False], 2, 1)
    for il in range(7):
        gemma4_attention(m, il, values=m.keys["attention.sliding_window_pattern"][il])
        gemma4_feed_forward(m, il, N_FF)


@fixture("gemma4+experts")
def gemma4_experts(m: Fixture) -> None:
    gemma4_base(m, [True, False] * 2, 2, 1, **EXPERTS)
    for il in range(4):
        gemma4_attention(m, il, values=m.keys["attention.sliding_window_pattern"][il])
        gemma4_feed_forward(m, il, N_FF)
        p = f"blk.{il}."
        for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
            m.norm(p + name, N_EMBD)
        mixture(m, il, norm="", gain=24.0)
        fuse_experts(m, il)
        m.put(p + "ffn_gate_inp.scale", 1 + 0.3 * m.normal(p + "ffn_gate_inp.scale", N_EMBD))
        m.put(p + "ffn_down_exps.scale", 1 + 0.5 * m.normal(p + "ffn_down_exps.scale", N_EXPERT))


@fixture("gemma4+shared")
def gemma4_shared(m: Fixture) -> None:
    """Build a model with per-layer embeddings. As in published files, the last three layers share caches,
    have a wider FFN, and do not read their K and V weights."""
    size, n_layer, owners = 16, 7, 4
    gemma4_base(m, [True, False, True, False, True, True, False], 1, 1)
    m.keys |= {
        "attention.shared_kv_layers": n_layer - owners,
        "embedding_length_per_layer_input": size,
        "feed_forward_length": [N_FF] * owners + [2 * N_FF] * (n_layer - owners),
    }
    m.matrix("per_layer_token_embd", N_VOCAB, n_layer * size, gain=sqrt(n_layer))
    m.matrix("per_layer_model_proj", n_layer * size, N_EMBD)
    m.norm("per_layer_proj_norm", size)
    for il in range(n_layer):
        gemma4_attention(m, il)
        gemma4_feed_forward(m, il, m.keys["feed_forward_length"][il])
        m.matrix(f"blk.{il}.inp_gate", size, N_EMBD)
        m.matrix(f"blk.{il}.proj", N_EMBD, size)
        m.norm(f"blk.{il}.post_norm", N_EMBD)
    m.unread += tuple(f"blk.{il}.attn_{name}" for il in range(owners, n_layer) for name in ("k", "v"))
