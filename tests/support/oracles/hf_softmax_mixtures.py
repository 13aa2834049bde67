"""Builds the fixtures of softmax_mixtures.py as models of `transformers`."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import transformers
from oracles.fixture import N_VOCAB, Fixture
from oracles.hf_dense import longrope, multipliers
from oracles.hf_parts import (
    State,
    builder,
    common,
    experts_of,
    fused_experts,
    halves_from_pairs,
    layers,
    renamed,
    rope,
    yarn,
)


@builder("deepseek", "bailingmoe")
def deepseek(m: Fixture) -> tuple[Any, State]:
    """Build Qwen2-MoE, which multiplies the shared expert's result by a sigmoid. With gates of 0 the sigmoid
    is 0.5, so the result is multiplied by 2."""
    k = m.keys
    n_dense = k["leading_dense_block_count"]
    config = transformers.Qwen2MoeConfig(
        **common(m),
        **experts_of(m),
        shared_expert_intermediate_size=k["expert_shared_count"] * k["expert_feed_forward_length"],
        norm_topk_prob=k.get("expert_weights_norm", False),
        mlp_only_layers=list(range(n_dense)),
        qkv_bias=False,
        use_sliding_window=False,
    )
    state = renamed(m)
    halves_from_pairs(m, state)
    fused_experts(m, state)
    for il in layers(m, "ffn_down_shexp.weight"):
        p = f"model.layers.{il}.mlp.shared_expert"
        state[f"{p}_gate.weight"] = np.zeros((1, k["embedding_length"]), np.float32)
        state[f"{p}.down_proj.weight"] = 2 * state[f"{p}.down_proj.weight"]
    return config, state


@builder("mellum", "mellum+bases")
def mellum(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    local = rope(m) | {"rope_theta": k.get("rope.freq_base_swa", k["rope.freq_base"])}
    config = transformers.MellumConfig(
        **common(m, rope_parameters={"full_attention": yarn(m), "sliding_attention": local}),
        **experts_of(m),
        norm_topk_prob=True,
        sliding_window=k["attention.sliding_window"],
        layer_types=[
            "sliding_attention" if local else "full_attention"
            for local in k["attention.sliding_window_pattern"]
        ],
    )
    state = renamed(m)
    fused_experts(m, state)
    return config, state


@builder("granite_swa", "granite_swa+experts")
def granite_swa(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    arguments = (
        common(m)
        | multipliers(m)
        | {
            "sliding_window": k["attention.sliding_window"],
            "layer_types": [
                "sliding_attention" if local else "full_attention"
                for local in k["attention.sliding_window_pattern"]
            ],
            "layer_rope_theta": [k["rope.freq_base"] * turns for turns in k["attention.rope_pattern"]],
        }
    )
    state = renamed(m, {"ffn_gate_inp": "block_sparse_moe.router"}, r"_exps\.|_shexp\.|attn_sinks")
    halves_from_pairs(m, state)
    for il in range(k["block_count"]):
        state[f"model.layers.{il}.self_attn.sinks"] = m[f"blk.{il}.attn_sinks.weight"]
    if "expert_count" not in k:
        return transformers.GraniteSWAConfig(**arguments), state
    config = transformers.GraniteMoeSWAConfig(
        **arguments,
        num_local_experts=k["expert_count"],
        num_experts_per_tok=k["expert_used_count"],
        shared_intermediate_size=k["expert_shared_feed_forward_length"],
    )
    names = {
        "gate_up_exps": "block_sparse_moe.experts.gate_up_proj",
        "down_exps": "block_sparse_moe.experts.down_proj",
        "up_shexp": "shared_mlp.input_linear.weight",
        "down_shexp": "shared_mlp.output_linear.weight",
    }
    for name, values in m.tensors.items():
        if found := re.fullmatch(r"blk\.(\d+)\.ffn_(\w+_(?:exps|shexp))\.weight", name):
            state[f"model.layers.{found[1]}.{names[found[2]]}"] = values
    return config, state


@builder("dbrx")
def dbrx(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    config = transformers.DbrxConfig(
        vocab_size=N_VOCAB,
        d_model=k["embedding_length"],
        n_heads=k["attention.head_count"],
        n_layers=k["block_count"],
        max_seq_len=k["context_length"],
        rope_parameters=rope(m),
        attn_config={
            "clip_qkv": k["attention.clamp_kqv"],
            "kv_n_heads": k["attention.head_count_kv"],
            "rope_theta": k["rope.freq_base"],
        },
        ffn_config={
            "ffn_hidden_size": k["feed_forward_length"],
            "moe_num_experts": k["expert_count"],
            "moe_top_k": k["expert_used_count"],
        },
    )
    names = {
        "token_embd": "transformer.wte",
        "output_norm": "transformer.norm_f",
        "output": "lm_head",
        "attn_norm": "norm_attn_norm.norm_1",
        "attn_qkv": "norm_attn_norm.attn.Wqkv",
        "attn_output": "norm_attn_norm.attn.out_proj",
        "attn_output_norm": "norm_attn_norm.norm_2",
        "ffn_gate_inp": "ffn.router.layer",
        "ffn_gate_exps": "ffn.experts.mlp.w1",
        "ffn_up_exps": "ffn.experts.mlp.v1",
        "ffn_down_exps": "ffn.experts.mlp.w2",
    }
    state = {}
    for name, values in m.tensors.items():
        *layer, stem, _ = name.split(".")
        where = f"transformer.blocks.{layer[1]}." if layer else ""
        if stem.endswith("_exps"):
            rows = values.swapaxes(1, 2) if "down" in stem else values
            state[where + names[stem]] = rows.reshape(-1, rows.shape[-1])
        else:
            state[f"{where}{names[stem]}.weight"] = values
    return config, state


@builder("phimoe")
def phimoe(m: Fixture) -> tuple[Any, State]:
    k, scale = m.keys, m.keys["rope.scaling.attn_factor"]
    config = transformers.PhimoeConfig(
        **common(m, rope_parameters=longrope(m, short_mscale=scale, long_mscale=scale)),
        original_max_position_embeddings=k["rope.scaling.original_context_length"],
        num_local_experts=k["expert_count"],
        num_experts_per_tok=k["expert_used_count"],
        attention_bias=True,
        lm_head_bias=True,
    )
    state = renamed(m, {"ffn_gate_inp": "mlp.router"})
    fused_experts(m, state)
    return config, state


@builder("grovemoe")
def grovemoe(m: Fixture) -> tuple[Any, State]:
    """Build Qwen3-MoE. Each expert also contains the columns of its group's additional expert."""
    k = m.keys
    config = transformers.Qwen3MoeConfig(**common(m), **experts_of(m), norm_topk_prob=True)
    config.moe_intermediate_size += k["expert_chunk_feed_forward_length"]
    state = renamed(m, skip=r"_(ch)?exps\.")
    for il in range(k["block_count"]):
        gate, up, down = (
            (m[f"{p}_exps.weight"], np.repeat(m[f"{p}_chexps.weight"], k["experts_per_group"], axis=0))
            for p in (f"blk.{il}.ffn_{name}" for name in ("gate", "up", "down"))
        )
        p = f"model.layers.{il}.mlp.experts."
        state[p + "gate_up_proj"] = np.concatenate([*gate, *up], 1)
        state[p + "down_proj"] = np.concatenate([down[0], k["expert_group_scale"] * down[1]], 2)
    return config, state
