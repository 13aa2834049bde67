"""The fixtures of more_decoders.py in `transformers`."""

from __future__ import annotations

from typing import Any

import numpy as np
import transformers
from oracles.fixture import Fixture
from oracles.hf_gemma import SANDWICH
from oracles.hf_parts import (
    State,
    builder,
    common,
    fused_experts,
    halves_from_pairs,
    layers,
    minus_one,
    renamed,
    yarn,
)


@builder("gemma")
def gemma(m: Fixture) -> tuple[Any, State]:
    state = renamed(m)
    minus_one(state)
    config = transformers.GemmaConfig(**common(m) | {"hidden_act": "gelu_pytorch_tanh"})
    return config, state


@builder("gemma2")
def gemma2(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    config = transformers.Gemma2Config(
        **common(m),
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=k["attention.sliding_window"],
        layer_types=["full_attention" if il % 2 else "sliding_attention" for il in range(k["block_count"])],
        query_pre_attn_scalar=k["attention.key_length"],
        attn_logit_softcapping=k["attn_logit_softcapping"],
        final_logit_softcapping=k["final_logit_softcapping"],
    )
    state = renamed(m, SANDWICH | {"ffn_norm": "pre_feedforward_layernorm"})
    minus_one(state)
    return config, state


def multipliers(m: Fixture) -> dict[str, Any]:
    return {
        "embedding_multiplier": m.keys["embedding_scale"],
        "residual_multiplier": m.keys["residual_scale"],
        "attention_multiplier": m.keys["attention.scale"],
        "logits_scaling": m.keys["logit_scale"],
    }


@builder("granite")
def granite(m: Fixture) -> tuple[Any, State]:
    state = renamed(m)
    halves_from_pairs(m, state)
    return transformers.GraniteConfig(**common(m), **multipliers(m)), state


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


@builder("smollm3")
def smollm3(m: Fixture) -> tuple[Any, State]:
    turned = [int((il + 1) % 4 != 0) for il in range(m.keys["block_count"])]
    state = renamed(m)
    halves_from_pairs(m, state)
    return transformers.SmolLM3Config(**common(m), no_rope_layers=turned, use_sliding_window=False), state


@builder("exaone4", "exaone4+window")
def exaone4(m: Fixture) -> tuple[Any, State]:
    window = m.keys.get("attention.sliding_window")
    kinds = [
        "sliding_attention" if window and il % 4 < 3 else "full_attention"
        for il in range(m.keys["block_count"])
    ]
    config = transformers.Exaone4Config(
        **common(m), sliding_window=window, sliding_window_pattern=4 if window else None, layer_types=kinds
    )
    names = {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    return config, renamed(m, names)


@builder("seed_oss")
def seed_oss(m: Fixture) -> tuple[Any, State]:
    config = transformers.SeedOssConfig(**common(m), attention_bias=True, attention_out_bias=False)
    return config, renamed(m, {"post_attention_norm": "post_attention_layernorm"})


@builder("ernie4_5")
def ernie4_5(m: Fixture) -> tuple[Any, State]:
    return transformers.Ernie4_5Config(**common(m), use_bias=False), renamed(m)


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
    names = {f"ffn_{n}_shexp": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")}
    state = renamed(m, names, r"_exps\.|exp_probs_b")
    fused_experts(m, state)
    for il in layers(m, "exp_probs_b.bias"):
        name = f"model.layers.{il}.mlp.gate.moe_statics.e_score_correction_bias"
        state[name] = m[f"blk.{il}.exp_probs_b.bias"][None]
    return config, state


HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}


@builder("hunyuan-dense")
def hunyuan_dense(m: Fixture) -> tuple[Any, State]:
    return transformers.HunYuanDenseV1Config(**common(m)), renamed(m, HUNYUAN)


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


@builder("qwen3vl")
def qwen3vl(m: Fixture) -> tuple[Any, State]:
    """Its text part is qwen3's: sections of RoPE are alike for text."""
    return transformers.Qwen3Config(**common(m), use_sliding_window=False), renamed(m)


def latent_arguments(m: Fixture) -> dict[str, Any]:
    """The arguments that every configuration with latent attention takes."""
    k, mla = m.keys, latent_suffix(m)
    shared = k["rope.dimension_count"]
    arguments = common(m, num_key_value_heads=k["attention.head_count"])
    del arguments["head_dim"]
    if "rope.scaling.type" in k:
        heat = {"llama_4_scaling_beta": k["attention.temperature_scale"]} if m.arch == "mistral4" else {}
        scaled = yarn(m, mscale=1.0, mscale_all_dim=10 * k["rope.scaling.yarn_log_multiplier"], **heat)
        arguments["rope_parameters"] = scaled
    return arguments | {
        "n_routed_experts": k["expert_count"],
        "num_experts_per_tok": k["expert_used_count"],
        "moe_intermediate_size": k["expert_feed_forward_length"],
        "n_shared_experts": k["expert_shared_count"],
        "routed_scaling_factor": k["expert_weights_scale"],
        "first_k_dense_replace": k["leading_dense_block_count"],
        "kv_lora_rank": k["attention.kv_lora_rank"],
        "q_lora_rank": k.get("attention.q_lora_rank"),
        "qk_rope_head_dim": shared,
        "qk_nope_head_dim": k["attention.key_length" + mla] - shared,
        "v_head_dim": k["attention.value_length" + mla],
        "n_group": k.get("expert_group_count", 1),
        "topk_group": k.get("expert_group_used_count", 1),
    }


def latent_suffix(m: Fixture) -> str:
    return "_mla" if "attention.key_length_mla" in m.keys else ""


def latent_state(m: Fixture, more: dict[str, str] | None = None) -> State:
    """The tensors of a model with latent attention and experts; `more` names further ones of a layer."""
    names = {f"ffn_{n}_shexp": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")}
    names |= {
        "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    }  # fmt: skip
    state = renamed(m, names | (more or {}), r"_exps\.|exp_probs_b|\.attn_k?v?_b")
    fused_experts(m, state)
    for il in range(m.keys["block_count"]):
        p, b = f"model.layers.{il}.", f"blk.{il}."
        if b + "exp_probs_b.bias" in m.tensors:
            state[p + "mlp.gate.e_score_correction_bias"] = m[b + "exp_probs_b.bias"]
        if not latent_suffix(m):
            state[p + "self_attn.kv_b_proj.weight"] = m[b + "attn_kv_b.weight"]
            continue
        up = np.concatenate([m[b + "attn_k_b.weight"].swapaxes(1, 2), m[b + "attn_v_b.weight"]], 1)
        state[p + "self_attn.kv_b_proj.weight"] = up.reshape(-1, m.keys["attention.kv_lora_rank"])
    return state


@builder("deepseek2", "deepseek2+heads", "deepseek2+softmax", "mistral4")
def deepseek2(m: Fixture) -> tuple[Any, State]:
    arguments = latent_arguments(m)
    if m.arch == "mistral4":
        config = transformers.Mistral4Config(**arguments, norm_topk_prob=True)
    elif m.keys["expert_gating_func"] == 2:
        config = transformers.DeepseekV3Config(**arguments, norm_topk_prob=True)
    else:
        config = transformers.DeepseekV2Config(**arguments, norm_topk_prob=False, topk_method="greedy")
    return config, latent_state(m)


def with_layer_norms(m: Fixture) -> dict[str, Any]:
    """`common` reads the epsilon of RMS norms: fill it in for LayerNorm, and drop the argument again."""
    m.keys.setdefault("attention.layer_norm_rms_epsilon", m.keys["attention.layer_norm_epsilon"])
    arguments = common(m)
    del arguments["rms_norm_eps"]
    return arguments


@builder("cohere2", "command-r")
def cohere2(m: Fixture) -> tuple[Any, State]:
    k, arguments = m.keys, with_layer_norms(m)
    arguments |= {"layer_norm_eps": k["attention.layer_norm_epsilon"], "logit_scale": k["logit_scale"]}
    del arguments["head_dim"]
    if "attention.sliding_window" not in k:
        return transformers.CohereConfig(**arguments, use_qk_norm=False), renamed(m)
    kinds = ["full_attention" if il % 4 == 3 else "sliding_attention" for il in range(k["block_count"])]
    config = transformers.Cohere2Config(
        **arguments, sliding_window=k["attention.sliding_window"], layer_types=kinds
    )
    return config, renamed(m)


@builder("starcoder2")
def starcoder2(m: Fixture) -> tuple[Any, State]:
    arguments = with_layer_norms(m) | {"hidden_act": "gelu_pytorch_tanh"}
    del arguments["head_dim"]
    config = transformers.Starcoder2Config(
        **arguments, norm_epsilon=m.keys["attention.layer_norm_epsilon"], use_bias=True, sliding_window=None
    )
    return config, renamed(m, {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"})
