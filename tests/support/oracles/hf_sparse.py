"""Fixtures with an indexer in `transformers`: deepseek32, glm-dsa."""

from __future__ import annotations

from typing import Any

import transformers
from oracles.fixture import Fixture
from oracles.hf_more_decoders import latent_arguments, latent_state
from oracles.hf_parts import State, builder

NAMES = {"attn_q_b": "wq_b", "attn_k": "wk", "k_norm": "k_norm", "proj": "weights_proj"}


@builder("deepseek32", "glm-dsa", "glm-dsa+shared")
def sparse(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    arguments = latent_arguments(m) | {
        "index_n_heads": k["attention.indexer.head_count"],
        "index_head_dim": k["attention.indexer.key_length"],
        "index_topk": k["attention.indexer.top_k"],
        "norm_topk_prob": True,
    }
    if m.arch == "deepseek32":
        config = transformers.DeepseekV32Config(**arguments)
    else:
        full = k.get("attention.indexer.types", [1] * k["block_count"])
        config = transformers.GlmMoeDsaConfig(
            **arguments, indexer_types=["full" if has else "shared" for has in full]
        )
    names = {f"indexer.{ours}": f"self_attn.indexer.{theirs}" for ours, theirs in NAMES.items()}
    return config, latent_state(m, names)
