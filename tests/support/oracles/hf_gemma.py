"""Build transformers' models of the fixtures in gemma.py."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from oracles.fixture import N_VOCAB, Fixture
from oracles.hf_parts import (
    SANDWICH,
    State,
    builder,
    common,
    minus_one,
    renamed,
    rope,
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


@builder("gemma3")
def gemma3(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    every = {
        "full_attention": rope(m, "linear", factor=k["rope.scaling.factor"]),
        "sliding_attention": rope(m) | {"rope_theta": k["rope.freq_base_swa"]},
    }
    kinds = ["full_attention" if il % 6 == 5 else "sliding_attention" for il in range(k["block_count"])]
    config = transformers.Gemma3TextConfig(
        **common(m, rope_parameters=every),
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=k["attention.sliding_window"],
        layer_types=kinds,
        query_pre_attn_scalar=k["attention.key_length"],
        final_logit_softcapping=k["final_logit_softcapping"],
    )
    state = renamed(m, SANDWICH | {"ffn_norm": "pre_feedforward_layernorm"})
    minus_one(state)
    return config, state


@builder("gemma3n")
def gemma3n(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    n_layer = k["block_count"]
    shares = torch.distributions.Normal(0.0, 1.0).cdf(torch.tensor(k["activation_sparsity_scale"]))
    config = transformers.Gemma3nTextConfig(
        **common(
            m,
            rope_parameters={
                "full_attention": rope(m),
                "sliding_attention": rope(m) | {"rope_theta": k["rope.freq_base_swa"]},
            },
        ),
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=k["attention.sliding_window"],
        layer_types=["full_attention" if il % 5 == 4 else "sliding_attention" for il in range(n_layer)],
        hidden_size_per_layer_input=k["embedding_length_per_layer_input"],
        vocab_size_per_layer_input=N_VOCAB,
        num_kv_shared_layers=k["attention.shared_kv_layers"],
        laurel_rank=m["blk.0.laurel_l.weight"].shape[0],
        activation_sparsity_pattern=shares.tolist(),
        final_logit_softcapping=30.0,
    )
    names = SANDWICH | {
        "ffn_norm": "pre_feedforward_layernorm",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_correct_coef": "altup.correction_coefs",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    }
    state = renamed(m, names, "|".join([r"^per_layer|^altup|altup_correct_scale", *m.unread]))
    for il in range(n_layer):
        scale = m[f"blk.{il}.altup_correct_scale.weight"]
        state[f"model.layers.{il}.altup.correct_output_scale"] = scale
    for name, theirs in (
        ("altup_proj", "altup_projections"),
        ("altup_unembd_proj", "altup_unembed_projections"),
    ):
        state |= {f"model.{theirs}.{i}.weight": part for i, part in enumerate(m[f"{name}.weight"])}
    return config, state | embeddings(m)


def embeddings(m: Fixture) -> State:
    return {
        "model.embed_tokens_per_layer.weight": m["per_layer_token_embd.weight"],
        "model.per_layer_model_projection.weight": m["per_layer_model_proj.weight"],
        "model.per_layer_projection_norm.weight": m["per_layer_proj_norm.weight"],
    }


@builder("gemma4", "gemma4+experts", "gemma4+shared")
def gemma4(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    pattern, n_ff = k["attention.sliding_window_pattern"], k["feed_forward_length"]
    kinds = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
    n_kv = dict(zip(kinds, k["attention.head_count_kv"], strict=True))
    n_pl, n_shared = k["embedding_length_per_layer_input"], k["attention.shared_kv_layers"]
    wide = isinstance(n_ff, list)
    arguments = common(
        m,
        head_dim=k["attention.key_length_swa"],
        num_key_value_heads=n_kv["sliding_attention"],
        intermediate_size=n_ff[0] if wide else n_ff,
        rope_parameters={
            "full_attention": rope(m, "proportional", partial_rotary_factor=0.25),
            "sliding_attention": rope(m) | {"rope_theta": k["rope.freq_base_swa"]},
        },
    )
    if "expert_count" in k:
        arguments |= {
            "enable_moe_block": True,
            "num_experts": k["expert_count"],
            "top_k_experts": k["expert_used_count"],
            "moe_intermediate_size": k["expert_feed_forward_length"],
        }
    config = transformers.Gemma4TextConfig(
        **arguments,
        global_head_dim=k["attention.key_length"],
        num_global_key_value_heads=n_kv["full_attention"],
        attention_k_eq_v=not wide,
        layer_types=kinds,
        sliding_window=k["attention.sliding_window"],
        final_logit_softcapping=k["final_logit_softcapping"],
        hidden_size_per_layer_input=n_pl,
        vocab_size_per_layer_input=N_VOCAB,
        num_kv_shared_layers=n_shared,
        use_double_wide_mlp=wide,
    )
    names = SANDWICH | {
        "ffn_norm": "pre_feedforward_layernorm",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp": "router.proj",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    }
    skip = "|".join([r"^rope_|^per_layer|_exps\.|layer_output_scale|ffn_gate_inp\.scale", *m.unread])
    state = renamed(m, names, skip)
    for il in range(len(kinds)):
        p, b = f"model.layers.{il}.", f"blk.{il}."
        state[p + "layer_scalar"] = m[b + "layer_output_scale.weight"]
        if "expert_count" in k:
            state[p + "router.scale"] = m[b + "ffn_gate_inp.scale"]
            state[p + "router.per_expert_scale"] = m[b + "ffn_down_exps.scale"]
            for name in ("gate_up", "down"):
                state[f"{p}experts.{name}_proj"] = m[f"{b}ffn_{name}_exps.weight"]
    return config, state | (embeddings(m) if n_pl else {})
