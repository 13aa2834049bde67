"""The fixtures of newer_mixtures.py in `transformers`."""

from __future__ import annotations

from typing import Any

import numpy as np
import transformers
from oracles.fixture import N_VOCAB, Fixture
from oracles.hf_decoders import llama3_rope
from oracles.hf_more_decoders import with_layer_norms
from oracles.hf_newer_decoders import selection_bias
from oracles.hf_parts import State, builder, common, experts_of, fused_experts, renamed, rope

SHARED = {f"ffn_{n}_shexp": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")}
SKIP = r"_exps\.|exp_probs_b"


@builder("olmoe")
def olmoe(m: Fixture) -> tuple[Any, State]:
    state = renamed(m)
    fused_experts(m, state)
    arguments = common(m, intermediate_size=m.keys["expert_feed_forward_length"])
    arguments |= {"num_experts": m.keys["expert_count"], "num_experts_per_tok": m.keys["expert_used_count"]}
    return transformers.OlmoeConfig(**arguments, norm_topk_prob=False), state


@builder("qwen3vlmoe")
def qwen3vlmoe(m: Fixture) -> tuple[Any, State]:
    """Its text part is qwen3moe's: sections of RoPE are alike for text."""
    state = renamed(m)
    fused_experts(m, state)
    return transformers.Qwen3MoeConfig(**common(m), **experts_of(m), norm_topk_prob=True), state


def behind_dense(m: Fixture) -> dict[str, Any]:
    k = m.keys
    return {
        "num_experts_per_tok": k["expert_used_count"],
        "moe_intermediate_size": k["expert_feed_forward_length"],
        "routed_scaling_factor": k["expert_weights_scale"],
        "first_k_dense_replace": k["leading_dense_block_count"],
        "norm_topk_prob": True,
    }


def kinds_of(m: Fixture) -> list[str]:
    return ["full_attention" if il % 4 == 3 else "sliding_attention" for il in range(m.keys["block_count"])]


@builder("dots1")
def dots1(m: Fixture) -> tuple[Any, State]:
    n = m.keys["block_count"]
    config = transformers.Dots1Config(
        **common(m),
        **behind_dense(m),
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
        **behind_dense(m),
        num_experts=m.keys["expert_count"],
        num_shared_experts=1,
        sliding_window=m.keys["attention.sliding_window"],
        sliding_window_pattern=4,
        layer_types=kinds_of(m),
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
        layer_types=kinds_of(m),
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


@builder("stablelm")
def stablelm(m: Fixture) -> tuple[Any, State]:
    arguments = with_layer_norms(m) | {"rope_parameters": rope(m, partial_rotary_factor=0.25)}
    arguments["layer_norm_eps"] = m.keys["attention.layer_norm_epsilon"]
    del arguments["head_dim"]
    return transformers.StableLmConfig(**arguments, use_qkv_bias=True), renamed(m)


@builder("gpt2")
def gpt2(m: Fixture) -> tuple[Any, State]:
    """Its matrices are [n_in, n_out]."""
    k = m.keys
    config = transformers.GPT2Config(
        vocab_size=N_VOCAB,
        n_positions=k["context_length"],
        n_embd=k["embedding_length"],
        n_layer=k["block_count"],
        n_head=k["attention.head_count"],
        n_inner=k["feed_forward_length"],
        layer_norm_epsilon=k["attention.layer_norm_epsilon"],
    )
    names = {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f", "attn_norm": "ln_1"}
    names |= {"ffn_norm": "ln_2", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj"}
    names |= {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
    state = {"lm_head.weight": m["token_embd.weight"]}
    for name, values in m.tensors.items():
        *layer, stem, kind = name.split(".")
        where = f"transformer.h.{layer[1]}" if layer else "transformer"
        state[f"{where}.{names[stem]}.{kind}"] = values.T if layer and values.ndim > 1 else values
    return config, state


@builder("apertus")
def apertus(m: Fixture) -> tuple[Any, State]:
    """Curves in float32: the configuration says the type."""
    config = transformers.ApertusConfig(
        **common(m, rope_parameters=llama3_rope(m), hidden_act="xielu"), dtype="float32"
    )
    state = renamed(m, {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"})
    for il in range(m.keys["block_count"]):
        for name in ("alpha_p", "alpha_n", "beta", "eps"):
            value = np.float32(m.keys[f"xielu.{name}"][il])
            state[f"model.layers.{il}.mlp.act_fn.{name}"] = value[None] if "alpha" in name else value
    return config, state


@builder("cohere2moe", "cohere2moe+rms")
def cohere2moe(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    arguments = with_layer_norms(m) if "attention.layer_norm_epsilon" in k else common(m)
    if "attention.layer_norm_epsilon" in k:
        arguments |= {"layer_norm_eps": k["attention.layer_norm_epsilon"], "rms_norm_eps": None}
    n_dense = k["leading_dense_block_count"]
    config = transformers.Cohere2MoeConfig(
        **arguments | {"intermediate_size": k["expert_feed_forward_length"]},
        prefix_dense_intermediate_size=k["feed_forward_length"],
        logit_scale=k["logit_scale"],
        sliding_window=k["attention.sliding_window"],
        layer_types=[
            "sliding_attention" if x else "full_attention" for x in k["attention.sliding_window_pattern"]
        ],
        mlp_layer_types=["sparse" if il >= n_dense else "dense" for il in range(k["block_count"])],
        num_experts=k["expert_count"],
        num_experts_per_tok=k["expert_used_count"],
        num_shared_experts=k.get("expert_shared_count", 0),
        expert_selection_fn="sigmoid",
        norm_topk_prob=k.get("expert_weights_norm", False),
    )
    state = renamed(m, SHARED, SKIP)
    fused_experts(m, state)
    return config, state
