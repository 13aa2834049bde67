"""Builds the fixtures of layer_norm.py as models of `transformers`."""

from __future__ import annotations

from typing import Any

import transformers
from oracles.fixture import N_VOCAB, Fixture
from oracles.hf_parts import SHARED, SKIP, State, builder, common, fused_experts, kinds_by_four, renamed, rope


def with_layer_norms(m: Fixture) -> dict[str, Any]:
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
    config = transformers.Cohere2Config(
        **arguments, sliding_window=k["attention.sliding_window"], layer_types=kinds_by_four(m)
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


@builder("stablelm")
def stablelm(m: Fixture) -> tuple[Any, State]:
    arguments = with_layer_norms(m) | {"rope_parameters": rope(m, partial_rotary_factor=0.25)}
    arguments["layer_norm_eps"] = m.keys["attention.layer_norm_epsilon"]
    del arguments["head_dim"]
    return transformers.StableLmConfig(**arguments, use_qkv_bias=True), renamed(m)


@builder("gpt2")
def gpt2(m: Fixture) -> tuple[Any, State]:
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
