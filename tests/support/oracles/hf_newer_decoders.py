"""The fixtures of newer_decoders.py in `transformers`."""

from __future__ import annotations

from typing import Any

import transformers
from oracles.fixture import Fixture
from oracles.hf_gemma import SANDWICH
from oracles.hf_parts import State, builder, common, fused_experts, layers, renamed, rope, yarn


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
