"""The fixtures of state_space.py in `transformers`."""

from __future__ import annotations

from typing import Any

import numpy as np
import transformers
from oracles.fixture import N_VOCAB, Fixture
from oracles.hf_parts import State, builder, layers


def scans(m: Fixture, state: State, where: str) -> None:
    """The state space layers; `where` has a place for the layer's number."""
    for il in layers(m, "ssm_a"):
        p, b = where.format(il), f"blk.{il}."
        state |= {
            p + "in_proj.weight": m[b + "ssm_in.weight"],
            p + "conv1d.weight": m[b + "ssm_conv1d.weight"][:, None],
            p + "conv1d.bias": m[b + "ssm_conv1d.bias"],
            p + "dt_bias": m[b + "ssm_dt.bias"],
            p + "A_log": np.log(-m[b + "ssm_a"][:, 0]),
            p + "D": m[b + "ssm_d"][:, 0],
            p + "out_proj.weight": m[b + "ssm_out.weight"],
        }
        if f"{b}ssm_norm.weight" in m.tensors:
            state[p + "norm.weight"] = m[b + "ssm_norm.weight"].reshape(-1)


@builder("mamba2")
def mamba2(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    config = transformers.Mamba2Config(
        vocab_size=N_VOCAB,
        hidden_size=k["embedding_length"],
        num_hidden_layers=k["block_count"],
        num_heads=k["ssm.time_step_rank"],
        head_dim=k["ssm.inner_size"] // k["ssm.time_step_rank"],
        state_size=k["ssm.state_size"],
        n_groups=k["ssm.group_count"],
        conv_kernel=k["ssm.conv_kernel"],
        expand=k["ssm.inner_size"] // k["embedding_length"],
        layer_norm_epsilon=k["attention.layer_norm_rms_epsilon"],
    )
    state = {
        "backbone.embeddings.weight": m["token_embd.weight"],
        "backbone.norm_f.weight": m["output_norm.weight"],
        "lm_head.weight": m["output.weight"],
    }
    for il in range(k["block_count"]):
        state[f"backbone.layers.{il}.norm.weight"] = m[f"blk.{il}.attn_norm.weight"]
    scans(m, state, "backbone.layers.{}.mixer.")
    return config, state
