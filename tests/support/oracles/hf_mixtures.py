"""Builds the fixtures of mixtures.py as models of `transformers`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from oracles.fixture import Fixture
from oracles.hf_dense import HUNYUAN, multipliers
from oracles.hf_parts import (
    MAKERS,
    SHARED,
    SKIP,
    State,
    builder,
    common,
    experts_of,
    fused_experts,
    gate_rows,
    halves_from_pairs,
    kinds_by_four,
    layers,
    minus_one,
    renamed,
    rope,
    selection_bias,
    yarn,
)
from transformers.models.minimax_m3_vl import MiniMaxM3VLTextConfig, modeling_minimax_m3_vl

INDEX = (
    ("head_count", "n_heads"), ("key_length", "head_dim"), ("block_size", "block_size"),
    ("top_k", "topk_blocks"), ("local_blocks", "local_blocks"),
)  # fmt: skip


@builder("llama+experts")
def mixtral(m: Fixture) -> tuple[Any, State]:
    config = transformers.MixtralConfig(
        **common(m), num_local_experts=m.keys["expert_count"], num_experts_per_tok=2, sliding_window=None
    )
    state = renamed(m)
    halves_from_pairs(m, state)
    fused_experts(m, state)
    return config, state


@builder("qwen2moe")
def qwen2moe(m: Fixture) -> tuple[Any, State]:
    config = transformers.Qwen2MoeConfig(
        **common(m),
        **experts_of(m),
        shared_expert_intermediate_size=m.keys["expert_shared_feed_forward_length"],
        norm_topk_prob=False,
        use_sliding_window=False,
    )
    state = renamed(m)
    fused_experts(m, state)
    gate_rows(m, state)
    return config, state


@builder("qwen3moe")
def qwen3moe(m: Fixture) -> tuple[Any, State]:
    config = transformers.Qwen3MoeConfig(**common(m), **experts_of(m), norm_topk_prob=True)
    state = renamed(m)
    fused_experts(m, state)
    return config, state


@builder("qwen3vlmoe")
def qwen3vlmoe(m: Fixture) -> tuple[Any, State]:
    state = renamed(m)
    fused_experts(m, state)
    return transformers.Qwen3MoeConfig(**common(m), **experts_of(m), norm_topk_prob=True), state


@builder("glm4moe")
def glm4moe(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    last = k["block_count"] - k["nextn_predict_layers"]
    config = transformers.Glm4MoeConfig(
        **common(m, rope_parameters=rope(m, partial_rotary_factor=0.5), num_hidden_layers=last),
        n_routed_experts=k["expert_count"],
        num_experts_per_tok=k["expert_used_count"],
        moe_intermediate_size=k["expert_feed_forward_length"],
        n_shared_experts=k["expert_shared_count"],
        routed_scaling_factor=k["expert_weights_scale"],
        first_k_dense_replace=k["leading_dense_block_count"],
        norm_topk_prob=k["expert_weights_norm"],
        n_group=1,
        topk_group=1,
        attention_bias=True,
        use_qk_norm=True,
    )
    skip = rf"blk\.{last}\.|_exps\.|exp_probs_b"
    state = renamed(m, SHARED | {"post_attention_norm": "post_attention_layernorm"}, skip)
    fused_experts(m, state)
    for il in layers(m, "exp_probs_b.bias"):
        state[f"model.layers.{il}.mlp.gate.e_score_correction_bias"] = m[f"blk.{il}.exp_probs_b.bias"]
    return config, {name: v for name, v in state.items() if f".{last}." not in name}


@builder("gpt-oss")
def gpt_oss(m: Fixture) -> tuple[Any, State]:
    """Build gpt-oss. GGUF has no key for `truncate`, which is true because llama.cpp always rounds the bounds
    of the YaRN ramp."""
    k = m.keys
    n_layer = k["block_count"]
    config = transformers.GptOssConfig(
        **common(
            m,
            rope_parameters=yarn(m, truncate=True),
            intermediate_size=k["expert_feed_forward_length"],
        ),
        num_local_experts=k["expert_count"],
        num_experts_per_tok=k["expert_used_count"],
        sliding_window=k["attention.sliding_window"],
        layer_types=["full_attention" if il % 2 else "sliding_attention" for il in range(n_layer)],
        attention_bias=True,
    )
    names = {"ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm"}
    state = renamed(m, names, r"_exps\.|attn_sinks")
    for il in range(n_layer):
        p, b = f"model.layers.{il}.", f"blk.{il}.ffn_"
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            gate, up = m[f"{b}gate_exps.{kind}"], m[f"{b}up_exps.{kind}"]
            both = np.stack([gate, up], 2).reshape(len(gate), -1, *gate.shape[2:])
            state[f"{p}mlp.experts.gate_up_proj{suffix}"] = both.swapaxes(1, -1) if kind == "weight" else both
        state[f"{p}mlp.experts.down_proj"] = m[f"{b}down_exps.weight"].swapaxes(1, 2)
        state[f"{p}mlp.experts.down_proj_bias"] = m[f"{b}down_exps.bias"]
        state[f"{p}self_attn.sinks"] = m[f"blk.{il}.attn_sinks.weight"]
    return config, state


@builder("granitemoe", "granitemoe+shared")
def granitemoe(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    shared = k.get("expert_shared_feed_forward_length", 0)
    make = transformers.GraniteMoeSharedConfig if shared else transformers.GraniteMoeConfig
    more = {"shared_intermediate_size": shared} if shared else {}
    config = make(
        **common(m, intermediate_size=k["expert_feed_forward_length"]),
        **multipliers(m),
        **more,
        num_local_experts=k["expert_count"],
        num_experts_per_tok=k["expert_used_count"],
    )
    state = renamed(m, {"ffn_gate_inp": "block_sparse_moe.router"}, r"_exps\.|_shexp\.")
    halves_from_pairs(m, state)
    fused_experts(m, state, "block_sparse_moe.experts")
    for il in layers(m, "ffn_down_shexp.weight"):
        p, b = f"model.layers.{il}.shared_mlp.", f"blk.{il}.ffn_"
        both = np.concatenate([m[f"{b}gate_shexp.weight"], m[f"{b}up_shexp.weight"]])
        state[p + "input_linear.weight"] = both
        state[p + "output_linear.weight"] = m[f"{b}down_shexp.weight"]
    return config, state


@builder("ernie4_5-moe")
def ernie4_5_moe(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    config = transformers.Ernie4_5_MoeConfig(
        **common(m),
        use_bias=False,
        moe_num_experts=k["expert_count"],
        moe_k=k["expert_used_count"],
        moe_num_shared_experts=k["expert_shared_count"],
        moe_intermediate_size=k["expert_feed_forward_length"],
        moe_layer_start_index=k["leading_dense_block_count"],
        moe_layer_end_index=k["block_count"] - 1,
    )
    state = renamed(m, SHARED, SKIP)
    fused_experts(m, state)
    for il in layers(m, "exp_probs_b.bias"):
        name = f"model.layers.{il}.mlp.gate.moe_statics.e_score_correction_bias"
        state[name] = m[f"blk.{il}.exp_probs_b.bias"][None]
    return config, state


@builder("hunyuan-moe")
def hunyuan_moe(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    config = transformers.HunYuanMoEV1Config(
        **common(m, intermediate_size=k["expert_feed_forward_length"]),
        num_experts=k["expert_count"],
        moe_topk=[k["expert_used_count"]] * k["block_count"],
    )
    names = {f"ffn_{n}_shexp": f"mlp.shared_mlp.{n}_proj" for n in ("gate", "up", "down")}
    state = renamed(m, HUNYUAN | names | {"ffn_gate_inp": "mlp.gate.wg"})
    fused_experts(m, state)
    return config, state


@builder("minimax-m2")
def minimax_m2(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    config = transformers.MiniMaxM2Config(
        **common(
            m,
            intermediate_size=k["expert_feed_forward_length"],
            rope_parameters=rope(m, partial_rotary_factor=0.5),
        ),
        num_local_experts=k["expert_count"],
        num_experts_per_tok=k["expert_used_count"],
    )
    state = renamed(m, skip=SKIP)
    fused_experts(m, state)
    selection_bias(m, state, "mlp.e_score_correction_bias")
    return config, state


@builder("llama4", "llama4+chunks", "llama4+two")
def llama4(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    config = transformers.Llama4TextConfig(
        **common(m, intermediate_size=k["expert_feed_forward_length"]),
        intermediate_size_mlp=k["feed_forward_length"],
        num_local_experts=k["expert_count"],
        num_experts_per_tok=k["expert_used_count"],
        interleave_moe_layer_step=k["interleave_moe_layer_step"],
        attention_chunk_size=k.get("attention.sliding_window", 8192),
        floor_scale=k.get("attention.temperature_length", 8192),
    )
    names = {f"ffn_{n}": f"feed_forward.{n}_proj" for n in ("gate", "up", "down")}
    names |= {f"ffn_{n}_shexp": f"feed_forward.shared_expert.{n}_proj" for n in ("gate", "up", "down")}
    state = renamed(m, names | {"ffn_gate_inp": "feed_forward.router"})
    fused_experts(m, state, "feed_forward.experts")
    for name in [name for name in state if ".experts." in name]:
        state[name] = state[name].swapaxes(1, 2)
    return config, state


@builder("olmoe")
def olmoe(m: Fixture) -> tuple[Any, State]:
    state = renamed(m)
    fused_experts(m, state)
    arguments = common(m, intermediate_size=m.keys["expert_feed_forward_length"])
    arguments |= {"num_experts": m.keys["expert_count"], "num_experts_per_tok": m.keys["expert_used_count"]}
    return transformers.OlmoeConfig(**arguments, norm_topk_prob=False), state


def dense_first(m: Fixture) -> dict[str, Any]:
    k = m.keys
    return {
        "num_experts_per_tok": k["expert_used_count"],
        "moe_intermediate_size": k["expert_feed_forward_length"],
        "routed_scaling_factor": k["expert_weights_scale"],
        "first_k_dense_replace": k["leading_dense_block_count"],
        "norm_topk_prob": True,
    }


@builder("dots1")
def dots1(m: Fixture) -> tuple[Any, State]:
    n = m.keys["block_count"]
    config = transformers.Dots1Config(
        **common(m),
        **dense_first(m),
        n_routed_experts=m.keys["expert_count"],
        n_shared_experts=1,
        layer_types=["full_attention"] * n,
        sliding_window=None,
    )
    state = renamed(m, SHARED, SKIP)
    fused_experts(m, state)
    selection_bias(m, state, "mlp.gate.e_score_correction_bias")
    return config, state


@builder("exaone-moe")
def exaone_moe(m: Fixture) -> tuple[Any, State]:
    config = transformers.ExaoneMoeConfig(
        **common(m),
        **dense_first(m),
        num_experts=m.keys["expert_count"],
        num_shared_experts=1,
        sliding_window=m.keys["attention.sliding_window"],
        sliding_window_pattern=4,
        layer_types=kinds_by_four(m),
        mlp_layer_types=["sparse" if il else "dense" for il in range(m.keys["block_count"])],
    )
    state = renamed(m, SHARED, SKIP)
    fused_experts(m, state)
    selection_bias(m, state, "mlp.gate.e_score_correction_bias")
    return config, state


@builder("afmoe")
def afmoe(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    config = transformers.AfmoeConfig(
        **common(m),
        **experts_of(m),
        num_shared_experts=1,
        num_dense_layers=k["leading_dense_block_count"],
        route_scale=k["expert_weights_scale"],
        sliding_window=k["attention.sliding_window"],
        layer_types=kinds_by_four(m),
        mup_enabled=True,
    )
    names = {
        "attn_gate": "self_attn.gate_proj",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_mlp_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_gate_inp": "mlp.router.gate",
    }
    state = renamed(m, SHARED | names, SKIP)
    fused_experts(m, state)
    selection_bias(m, state, "mlp.expert_bias")
    return config, state


@builder("minimax-m3", "minimax-m3+all")
def minimax_m3(m: Fixture) -> tuple[Any, State]:
    k, n_dense = m.keys, m.keys["leading_dense_block_count"]
    n_sparse = k["block_count"] - n_dense
    index = {f"attention.indexer.{old}": f"index_{new}" for old, new in INDEX}
    config = MiniMaxM3VLTextConfig(
        **common(m, rope_parameters=rope(m, partial_rotary_factor=0.5)),
        **{new: k[old] for old, new in index.items()},
        num_local_experts=k["expert_count"],
        num_experts_per_tok=k["expert_used_count"],
        dense_intermediate_size=k["feed_forward_length"],
        shared_intermediate_size=k["expert_feed_forward_length"],
        routed_scaling_factor=k["expert_weights_scale"],
        rotary_dim=k["rope.dimension_count"],
        layer_types=["full_attention"] * n_dense + ["minimax_m3_sparse"] * n_sparse,
        mlp_layer_types=["dense"] * n_dense + ["sparse"] * n_sparse,
    )
    config.intermediate_size = k["expert_feed_forward_length"]
    names = {f"indexer.{x}": f"self_attn.indexer.{x}" for x in ("q_proj", "k_proj", "q_norm", "k_norm")}
    state = renamed(m, names, rf"{SKIP}|ffn_(gate|up)(_shexp)?\.|ffn_down_shexp")
    minus_one(state)
    fused_experts(m, state)
    selection_bias(m, state, "mlp.gate.e_score_correction_bias")
    for il in range(k["block_count"]):
        suffix, where = ("", "") if il < n_dense else ("_shexp", "shared_experts.")
        p, b = f"model.layers.{il}.mlp.{where}", f"blk.{il}.ffn_"
        parts = [m[f"{b}{name}{suffix}.weight"] for name in ("gate", "up")]
        state[f"{p}gate_up_proj.weight"] = np.concatenate(parts)
        state[f"{p}down_proj.weight"] = m[f"{b}down{suffix}.weight"]
    return config, state


MAKERS[MiniMaxM3VLTextConfig] = lambda config: modeling_minimax_m3_vl.MiniMaxM3VLForCausalLM._from_config(
    config, dtype=torch.float32
)
