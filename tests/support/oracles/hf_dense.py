"""Builds the fixtures of dense.py as models of `transformers`."""

from __future__ import annotations

from typing import Any

import numpy as np
import transformers
from oracles.dense import LLAMA3
from oracles.fixture import Fixture
from oracles.hf_parts import (
    SANDWICH,
    State,
    builder,
    common,
    halves_from_pairs,
    kinds_by_four,
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


@builder("mistral3")
def mistral3(m: Fixture) -> tuple[Any, State]:
    scaled = yarn(
        m, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=m.keys["attention.temperature_scale"]
    )
    state = renamed(m)
    halves_from_pairs(m, state)
    return transformers.Ministral3Config(**common(m, rope_parameters=scaled)), state


@builder("qwen2", "qwen2vl")
def qwen2(m: Fixture) -> tuple[Any, State]:
    return transformers.Qwen2Config(**common(m), use_sliding_window=False), renamed(m)


@builder("qwen3")
def qwen3(m: Fixture) -> tuple[Any, State]:
    return transformers.Qwen3Config(**common(m), use_sliding_window=False), renamed(m)


@builder("qwen3vl")
def qwen3vl(m: Fixture) -> tuple[Any, State]:
    return transformers.Qwen3Config(**common(m), use_sliding_window=False), renamed(m)


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
        **common(m),
        sliding_window=window,
        sliding_window_pattern=4 if window else None,
        layer_types=kinds,
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


HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}


@builder("hunyuan-dense")
def hunyuan_dense(m: Fixture) -> tuple[Any, State]:
    return transformers.HunYuanDenseV1Config(**common(m)), renamed(m, HUNYUAN)


@builder("olmo2", "olmo2+window")
def olmo2(m: Fixture) -> tuple[Any, State]:
    arguments, state = common(m), renamed(m, SANDWICH)
    del arguments["head_dim"]
    window = m.keys.get("attention.sliding_window")
    if not window:
        return transformers.Olmo2Config(**arguments), state
    arguments["rope_parameters"] = {"full_attention": yarn(m), "sliding_attention": rope(m)}
    return transformers.Olmo3Config(**arguments, sliding_window=window, layer_types=kinds_by_four(m)), state


@builder("apertus")
def apertus(m: Fixture) -> tuple[Any, State]:
    config = transformers.ApertusConfig(
        **common(m, rope_parameters=llama3_rope(m), hidden_act="xielu"), dtype="float32"
    )
    state = renamed(m, {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"})
    for il in range(m.keys["block_count"]):
        for name in ("alpha_p", "alpha_n", "beta", "eps"):
            value = np.float32(m.keys[f"xielu.{name}"][il])
            state[f"model.layers.{il}.mlp.act_fn.{name}"] = value[None] if "alpha" in name else value
    return config, state
