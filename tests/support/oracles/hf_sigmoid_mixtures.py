"""Builds the fixtures of sigmoid_mixtures.py as models of `transformers`."""

from __future__ import annotations

from typing import Any

import numpy as np
import transformers
from oracles.fixture import Fixture
from oracles.hf_parts import (
    MAKERS,
    SHARED,
    SKIP,
    State,
    TextModel,
    builder,
    common,
    experts_of,
    fused_experts,
    layers,
    minus_one,
    renamed,
    rope,
    selection_bias,
    yarn,
)
from oracles.parts import HEAD_DIM
from transformers.models.step3p7 import modeling_step3p7

LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128
}  # fmt: skip


def trunk(m: Fixture, state: State) -> State:
    first, n = m.n_layer, m.keys["block_count"]
    gone = tuple(f"model.layers.{il}." for il in range(first, n))
    return {name: values for name, values in state.items() if not gone or not name.startswith(gone)}


def skip_ahead(m: Fixture) -> str:
    ahead = [rf"blk\.{il}\." for il in range(m.n_layer, m.keys["block_count"])]
    return "|".join([SKIP, *ahead])


def kinds(m: Fixture) -> list[str]:
    pattern = m.keys["attention.sliding_window_pattern"][: m.n_layer]
    return ["sliding_attention" if local else "full_attention" for local in pattern]


def dense_or_sparse(m: Fixture) -> list[str]:
    sparse = layers(m, "ffn_gate_inp.weight")
    return ["sparse" if il in sparse else "dense" for il in range(m.n_layer)]


@builder("bailingmoe2")
def bailingmoe2(m: Fixture) -> tuple[Any, State]:
    """Build GLM-4.5, which computes the same graph, because transformers lacks Ling 2."""
    k = m.keys
    config = transformers.Glm4MoeConfig(
        **common(m, rope_parameters=rope(m, partial_rotary_factor=0.5), num_hidden_layers=m.n_layer),
        n_routed_experts=k["expert_count"],
        num_experts_per_tok=k["expert_used_count"],
        moe_intermediate_size=k["expert_feed_forward_length"],
        n_shared_experts=k["expert_shared_count"],
        routed_scaling_factor=k["expert_weights_scale"],
        first_k_dense_replace=k["leading_dense_block_count"],
        norm_topk_prob=True,
        n_group=k["expert_group_count"],
        topk_group=k["expert_group_used_count"],
        attention_bias=False,
        use_qk_norm=True,
    )
    state = renamed(m, SHARED, skip_ahead(m))
    for il in range(m.n_layer):
        p = f"model.layers.{il}.self_attn."
        q, k_, v = np.split(state.pop(p + "qkv_proj.weight"), [64, 96])
        state |= {p + "q_proj.weight": q, p + "k_proj.weight": k_, p + "v_proj.weight": v}
    fused_experts(m, state)
    selection_bias(m, state, "mlp.gate.e_score_correction_bias")
    return config, trunk(m, state)


@builder("hy_v3")
def hy_v3(m: Fixture) -> tuple[Any, State]:
    config = transformers.HYV3Config(
        **common(m, num_hidden_layers=m.n_layer),
        **experts_of(m),
        num_shared_experts=1,
        router_scaling_factor=m.keys["expert_weights_scale"],
        mlp_layer_types=dense_or_sparse(m),
    )
    state = renamed(m, SHARED, skip_ahead(m))
    fused_experts(m, state)
    for il in layers(m, "exp_probs_b"):
        state[f"model.layers.{il}.mlp.e_score_correction_bias"] = m[f"blk.{il}.exp_probs_b"]
    return config, trunk(m, state)


@builder("mimo2")
def mimo2(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    bases = {"full_attention": k["rope.freq_base"], "sliding_attention": k["rope.freq_base_swa"]}
    part = k["rope.dimension_count"] / k["attention.key_length"]
    turned = {
        kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": part}
        for kind, base in bases.items()
    }
    config = transformers.MiMoV2FlashConfig(
        **common(m, rope_parameters=turned, num_key_value_heads=1),
        n_routed_experts=k["expert_count"],
        num_experts_per_tok=k["expert_used_count"],
        moe_intermediate_size=k["expert_feed_forward_length"],
        v_head_dim=k["attention.value_length"],
        sliding_window=k["attention.sliding_window"],
        attention_value_scale=k["attention.value_scale"],
        layer_types=kinds(m),
        mlp_layer_types=dense_or_sparse(m),
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
    )
    state = renamed(m, SHARED, SKIP + "|attn_sinks")
    for il in layers(m, "attn_sinks.weight"):
        state[f"model.layers.{il}.self_attn.sinks"] = m[f"blk.{il}.attn_sinks.weight"]
    fused_experts(m, state)
    selection_bias(m, state, "mlp.gate.e_score_correction_bias")
    return config, state


@builder("step35")
def step35(m: Fixture) -> tuple[Any, State]:
    k, n = m.keys, m.n_layer
    full = {"rope_type": "llama3", "rope_theta": k["rope.freq_base"], "partial_rotary_factor": 0.5} | LLAMA3
    config = transformers.Step3p7TextConfig(
        **common(m, num_hidden_layers=n, num_attention_heads=4, num_key_value_heads=2)
        | {
            "rope_parameters": {
                "full_attention": full,
                "sliding_attention": {"rope_type": "default", "rope_theta": k["rope.freq_base_swa"]},
            },
            "pad_token_id": 1,
        },
        num_sliding_attention_heads=6,
        layer_types=kinds(m),
        mlp_layer_types=dense_or_sparse(m),
        n_routed_experts=k["expert_count"],
        num_experts_per_tok=k["expert_used_count"],
        moe_intermediate_size=k["expert_feed_forward_length"],
        share_expert_dim=k["expert_shared_feed_forward_length"],
        moe_router_scaling_factor=k["expert_weights_scale"],
        sliding_window=k["attention.sliding_window"],
        swiglu_limits=k["swiglu_clamp_exp"][:n],
        swiglu_limits_shared=k["swiglu_clamp_shexp"][:n],
    )
    state = renamed(m, SHARED | {"attn_gate": "self_attn.g_proj"}, skip_ahead(m) + "|rope_freqs")
    fused_experts(m, state)
    selection_bias(m, state, "mlp.gate.e_score_correction_bias")
    minus_one(state)
    return config, trunk(m, state)


@builder("laguna", "laguna+elements")
def laguna(m: Fixture) -> tuple[Any, State]:
    k, n = m.keys, m.keys["block_count"]
    windowed = "attention.sliding_window" in k
    part = k["rope.dimension_count"] / HEAD_DIM
    full = (yarn(m) if windowed else rope(m)) | {"partial_rotary_factor": part}
    local = {"rope_type": "default", "rope_theta": k.get("rope.freq_base_swa", 1.0)}
    config = transformers.LagunaConfig(
        **common(
            m,
            num_attention_heads=4,
            rope_parameters={"full_attention": full, "sliding_attention": local},
        ),
        **experts_of(m),
        num_attention_heads_per_layer=k["attention.head_count"],
        gating="per-head" if windowed else "per-element",
        shared_expert_intermediate_size=k["expert_shared_feed_forward_length"],
        moe_routed_scaling_factor=k["expert_weights_scale"],
        mlp_layer_types=dense_or_sparse(m),
        layer_types=["sliding_attention" if windowed and il % 4 else "full_attention" for il in range(n)],
        sliding_window=k.get("attention.sliding_window", 12),
    )
    state = renamed(m, SHARED | {"attn_gate": "self_attn.g_proj"}, SKIP)
    fused_experts(m, state)
    selection_bias(m, state, "mlp.gate.e_score_correction_bias")
    return config, state


MAKERS[transformers.Step3p7TextConfig] = lambda config: TextModel(config, modeling_step3p7.Step3p7TextModel)
