"""The fixtures of decoders.py in `transformers`."""

from __future__ import annotations

from typing import Any

import numpy as np
import transformers
from oracles.decoders import LLAMA3
from oracles.fixture import Fixture
from oracles.hf_parts import (
    State,
    builder,
    common,
    experts_of,
    fused_experts,
    gate_rows,
    halves_from_pairs,
    layers,
    renamed,
    rope,
    yarn,
)


def llama3_rope(m: Fixture) -> dict[str, Any]:
    return rope(
        m,
        "llama3",
        factor=LLAMA3["factor"],
        low_freq_factor=LLAMA3["low_freq_factor"],
        high_freq_factor=LLAMA3["high_freq_factor"],
        original_max_position_embeddings=int(LLAMA3["original"]),
    )


@builder("llama", "llama+longrope")
def llama(m: Fixture) -> tuple[Any, State]:
    scaled = llama3_rope(m)
    if "rope_freqs.weight" not in m.tensors:
        scaled = longrope(m)
    biased = "blk.0.attn_q.bias" in m.tensors
    config = transformers.LlamaConfig(
        **common(m, rope_parameters=scaled, attention_bias=biased, mlp_bias=biased)
    )
    state = renamed(m)
    halves_from_pairs(m, state)
    return config, state


def longrope(m: Fixture, **more: Any) -> dict[str, Any]:
    return rope(
        m,
        "longrope",
        long_factor=m["rope_factors_long.weight"].tolist(),
        short_factor=m["rope_factors_short.weight"].tolist(),
        factor=m.keys["context_length"] / m.keys["rope.scaling.original_context_length"],
        original_max_position_embeddings=m.keys["rope.scaling.original_context_length"],
        **more,
    )


@builder("llama+experts")
def mixtral(m: Fixture) -> tuple[Any, State]:
    config = transformers.MixtralConfig(
        **common(m), num_local_experts=m.keys["expert_count"], num_experts_per_tok=2, sliding_window=None
    )
    state = renamed(m)
    halves_from_pairs(m, state)
    fused_experts(m, state)
    return config, state


@builder("mistral3")
def mistral3(m: Fixture) -> tuple[Any, State]:
    scaled = yarn(
        m, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=m.keys["attention.temperature_scale"]
    )
    state = renamed(m)
    halves_from_pairs(m, state)
    return transformers.Ministral3Config(**common(m, rope_parameters=scaled)), state


@builder("qwen2")
def qwen2(m: Fixture) -> tuple[Any, State]:
    return transformers.Qwen2Config(**common(m), use_sliding_window=False), renamed(m)


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


@builder("qwen3")
def qwen3(m: Fixture) -> tuple[Any, State]:
    return transformers.Qwen3Config(**common(m), use_sliding_window=False), renamed(m)


@builder("qwen3moe")
def qwen3moe(m: Fixture) -> tuple[Any, State]:
    config = transformers.Qwen3MoeConfig(**common(m), **experts_of(m), norm_topk_prob=True)
    state = renamed(m)
    fused_experts(m, state)
    return config, state


@builder("phi3", "phi3+short", "phi3+window")
def phi3(m: Fixture) -> tuple[Any, State]:
    part = m.keys["rope.dimension_count"] / m.keys["attention.key_length"]
    scaled = rope(m)
    if "rope_factors_long.weight" in m.tensors:
        scaled = longrope(m, partial_rotary_factor=part)
    config = transformers.Phi3Config(
        **common(m, rope_parameters=scaled),
        original_max_position_embeddings=scaled.get("original_max_position_embeddings", 256),
        sliding_window=m.keys["attention.sliding_window"] or None,
    )
    return config, renamed(m, {"ffn_up": "mlp.gate_up_proj"})


@builder("glm4")
def glm4(m: Fixture) -> tuple[Any, State]:
    config = transformers.Glm4Config(
        **common(m, rope_parameters=rope(m, partial_rotary_factor=0.5)), attention_bias=True
    )
    names = {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    }
    return config, renamed(m, names)


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
    shared = {f"ffn_{n}_shexp": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")}
    skip = rf"blk\.{last}\.|_exps\.|exp_probs_b"
    state = renamed(m, shared | {"post_attention_norm": "post_attention_layernorm"}, skip)
    fused_experts(m, state)
    for il in layers(m, "exp_probs_b.bias"):
        state[f"model.layers.{il}.mlp.gate.e_score_correction_bias"] = m[f"blk.{il}.exp_probs_b.bias"]
    return config, {name: v for name, v in state.items() if f".{last}." not in name}


@builder("gpt-oss")
def gpt_oss(m: Fixture) -> tuple[Any, State]:
    """`truncate`: GGUF has no key for whole bounds of the YaRN ramp, and llama.cpp always takes them."""
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
            both = np.stack([gate, up], 2).reshape(len(gate), -1, *gate.shape[2:])  # rows alternate
            state[f"{p}mlp.experts.gate_up_proj{suffix}"] = both.swapaxes(1, -1) if kind == "weight" else both
        state[f"{p}mlp.experts.down_proj"] = m[f"{b}down_exps.weight"].swapaxes(1, 2)
        state[f"{p}mlp.experts.down_proj_bias"] = m[f"{b}down_exps.bias"]
        state[f"{p}self_attn.sinks"] = m[f"blk.{il}.attn_sinks.weight"]
    return config, state
