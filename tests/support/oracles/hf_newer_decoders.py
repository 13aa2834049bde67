"""The fixtures of newer_decoders.py in `transformers`."""

from __future__ import annotations

from typing import Any

import transformers
from oracles.fixture import Fixture
from oracles.hf_gemma import SANDWICH
from oracles.hf_parts import State, builder, common, experts_of, fused_experts, layers, renamed, rope, yarn


@builder("olmo2", "olmo2+window")
def olmo2(m: Fixture) -> tuple[Any, State]:
    arguments, state = common(m), renamed(m, SANDWICH)
    del arguments["head_dim"]
    window = m.keys.get("attention.sliding_window")
    if not window:
        return transformers.Olmo2Config(**arguments), state
    arguments["rope_parameters"] = {"full_attention": yarn(m), "sliding_attention": rope(m)}
    kinds = ["full_attention" if il % 4 == 3 else "sliding_attention" for il in range(m.keys["block_count"])]
    return transformers.Olmo3Config(**arguments, sliding_window=window, layer_types=kinds), state


def selection_bias(m: Fixture, state: State, name: str) -> None:
    for il in layers(m, "exp_probs_b.bias"):
        state[f"model.layers.{il}.{name}"] = m[f"blk.{il}.exp_probs_b.bias"]


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
    state = renamed(m, skip=r"_exps\.|exp_probs_b")
    fused_experts(m, state)
    selection_bias(m, state, "mlp.e_score_correction_bias")
    return config, state


@builder("lfm2", "lfm2moe")
def lfm2(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    kinds = ["full_attention" if n else "conv" for n in k["attention.head_count_kv"]]
    arguments = common(m, num_key_value_heads=max(k["attention.head_count_kv"]))
    for name in ("head_dim", "hidden_act"):
        del arguments[name]
    arguments |= {"norm_eps": arguments.pop("rms_norm_eps"), "conv_L_cache": k["shortconv.l_cache"]}
    arguments |= {"layer_types": kinds}
    names = {
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
        "shortconv.conv": "conv.conv",
        "ffn_gate_inp": "feed_forward.gate",
    }
    names |= {f"ffn_{n}": f"feed_forward.w{i}" for n, i in (("gate", 1), ("down", 2), ("up", 3))}
    state = renamed(m, names, r"_exps\.|exp_probs_b")
    for name in [name for name in state if name.endswith(".conv.conv.weight")]:
        state[name] = state[name][:, None]
    if m.arch == "lfm2":
        return transformers.Lfm2Config(**arguments, block_auto_adjust_ff_dim=False), state
    fused_experts(m, state, "feed_forward.experts")
    selection_bias(m, state, "feed_forward.expert_bias")
    config = transformers.Lfm2MoeConfig(
        **arguments, **experts_of(m), num_dense_layers=k["leading_dense_block_count"], norm_topk_prob=True
    )
    return config, state


@builder("llama4", "llama4+chunks")
def llama4(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    config = transformers.Llama4TextConfig(
        **common(m, intermediate_size=k["expert_feed_forward_length"]),
        intermediate_size_mlp=k["feed_forward_length"],
        num_local_experts=k["expert_count"],
        num_experts_per_tok=1,
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
