"""Fixtures whose experts are chosen by a sigmoid plus a bias."""

from __future__ import annotations

import numpy as np
from oracles.dense import llama3_factors
from oracles.fixture import Fixture
from oracles.parts import (
    EXPERTS,
    HEAD_DIM,
    N_EMBD,
    N_FF_EXP,
    attention,
    base,
    feed_forward,
    fixture,
    mixture,
    selection_bias,
)


def fuse_qkv(m: Fixture, il: int) -> None:
    p = f"blk.{il}.attn_"
    m.put(p + "qkv.weight", np.concatenate([m.tensors.pop(f"{p}{name}.weight") for name in "qkv"]))


def ahead(m: Fixture, il: int, last: str = "nextn.shared_head_norm") -> None:
    """Add the tensors of a multi-token prediction head as layer `il`. The head does not change the logits."""
    m.unread = (f"blk.{il}.",)
    m.matrix(f"blk.{il}.nextn.eh_proj", N_EMBD, 2 * N_EMBD)
    for name in ("nextn.enorm", "nextn.hnorm", last):
        m.norm(f"blk.{il}.{name}", N_EMBD)


@fixture("bailingmoe2")
def bailingmoe2(m: Fixture) -> None:
    base(
        m, 4, **EXPERTS, rope__dimension_count=HEAD_DIM // 2, expert_shared_count=1,
        expert_shared_feed_forward_length=N_FF_EXP, leading_dense_block_count=1, expert_gating_func=2,
        expert_weights_scale=2.5, expert_weights_norm=True, expert_group_count=4, expert_group_used_count=2,
        nextn_predict_layers=1,
    )  # fmt: skip
    for il in range(4):
        attention(m, il, head_norms=True)
        fuse_qkv(m, il)
        if il == 0:
            feed_forward(m, il)
            continue
        mixture(m, il)
        selection_bias(m, il)
        feed_forward(m, il, norm="", suffix="_shexp")
    ahead(m, 3, "layer_output_norm")


@fixture("hy_v3")
def hy_v3(m: Fixture) -> None:
    base(
        m, 4, **EXPERTS, expert_shared_feed_forward_length=N_FF_EXP, expert_gating_func=2,
        expert_weights_scale=2.5, expert_weights_norm=True, nextn_predict_layers=1,
    )  # fmt: skip
    for il in range(4):
        attention(m, il, head_norms=True)
        if il == 0:
            feed_forward(m, il)
            continue
        mixture(m, il)
        selection_bias(m, il)
        m.put(f"blk.{il}.exp_probs_b", m.tensors.pop(f"blk.{il}.exp_probs_b.bias"))
        feed_forward(m, il, norm="", suffix="_shexp")
    ahead(m, 3)


@fixture("mimo2")
def mimo2(m: Fixture) -> None:
    """Build a model whose windowed layers have twice as many kv heads."""
    local = [0, 1, 1, 0]
    base(
        m, 4, **EXPERTS, n_kv=[1 + windowed for windowed in local], attention__key_length=24,
        rope__dimension_count=8, rope__freq_base_swa=100.0, attention__sliding_window=12,
        attention__sliding_window_pattern=local, attention__value_scale=0.707,
    )  # fmt: skip
    for il in range(4):
        m.keys["attention.head_count_kv"] = 1 + local[il]
        attention(m, il)
        p = f"blk.{il}."
        for name, *shape in (("v", (1 + local[il]) * HEAD_DIM, N_EMBD), ("output", N_EMBD, 4 * HEAD_DIM)):
            del m.tensors[f"{p}attn_{name}.weight"]
            m.matrix(f"{p}attn_{name}", *shape)
        if local[il]:
            m.put(p + "attn_sinks.weight", m.normal(p + "attn_sinks", 4) + 1)
        if il == 0:
            feed_forward(m, il)
            continue
        mixture(m, il)
        selection_bias(m, il)
    m.keys["attention.head_count_kv"] = [1 + windowed for windowed in local]


def gated_layers(m: Fixture, heads: list[int], widths: list[int]) -> None:
    """Add layers with `heads` heads and gates of `widths`. The first layer has no experts."""
    for il, (n_head, width) in enumerate(zip(heads, widths, strict=True)):
        m.keys["attention.head_count"] = n_head
        attention(m, il, head_norms=True)
        m.matrix(f"blk.{il}.attn_gate", width, N_EMBD, gain=2.0)
        if il == 0:
            feed_forward(m, il)
            continue
        mixture(m, il)
        selection_bias(m, il)
        feed_forward(m, il, norm="", suffix="_shexp")
    m.keys["attention.head_count"] = heads


@fixture("step35")
def step35(m: Fixture) -> None:
    """Build a model that limits activations in all ways, with RoPE frequency factors."""
    local = [False, True, True, False, True]
    heads = [6 if windowed else 4 for windowed in local]
    base(
        m, 5, **EXPERTS, expert_shared_feed_forward_length=48, leading_dense_block_count=1,
        moe_every_n_layers=1, expert_gating_func=2, expert_weights_scale=2.5, expert_weights_norm=True,
        rope__freq_base_swa=100.0, attention__sliding_window=12, attention__sliding_window_pattern=local,
        nextn_predict_layers=1, swiglu_clamp_exp=[0.0, 0.0, 0.25, 0.5, 0.0],
        swiglu_clamp_shexp=[0.3, 0.0, 0.5, 0.0, 0.0],
    )  # fmt: skip
    # Layers without a window use the first half of the factors. Other layers use no factors.
    m.put("rope_freqs.weight", np.tile(llama3_factors(HEAD_DIM // 2, 1000.0), 2))
    gated_layers(m, heads, heads)
    ahead(m, 4)


LAGUNA = {
    "expert_shared_feed_forward_length": 48, "leading_dense_block_count": 1, "expert_gating_func": 2,
    "expert_weights_scale": 2.5, "expert_weights_norm": True,
}  # fmt: skip


@fixture("laguna")
def laguna(m: Fixture) -> None:
    """Build a model whose full layers have YaRN on a half of each head."""
    heads = [4, 6, 6, 6, 4]
    base(
        m, 5, **EXPERTS, **LAGUNA, attention__sliding_window=12, rope__dimension_count=HEAD_DIM // 2,
        rope__dimension_count_swa=HEAD_DIM, rope__freq_base_swa=100.0, rope__scaling__type="yarn",
        rope__scaling__factor=8.0, rope__scaling__original_context_length=32,
    )  # fmt: skip
    gated_layers(m, heads, heads)


@fixture("laguna+elements")
def laguna_elements(m: Fixture) -> None:
    """Build a model with a gate per element, and without windows."""
    base(m, 3, **EXPERTS, **LAGUNA)
    gated_layers(m, [4] * 3, [4 * HEAD_DIM] * 3)
