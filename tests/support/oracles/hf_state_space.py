"""Builds the fixtures of state_space.py as models of `transformers`."""

from __future__ import annotations

from typing import Any

import numpy as np
import transformers
from oracles.fixture import N_VOCAB, Fixture
from oracles.hf_dense import llama3_rope, multipliers
from oracles.hf_parts import State, builder, common, fused_experts, halves_from_pairs, layers, renamed, rope


def scans(m: Fixture, state: State, where: str) -> None:
    """Add the Mamba-2 layers to `state`. `where.format(il)` is the prefix of layer il's tensors."""
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


def selections(m: Fixture, state: State, where: str) -> None:
    """Add the Mamba-1 layers to `state`. `where.format(il)` is the prefix of layer il's tensors."""
    for il in layers(m, "ssm_a"):
        p, b = where.format(il), f"blk.{il}."
        state |= {
            p + "in_proj.weight": m[b + "ssm_in.weight"],
            p + "conv1d.weight": m[b + "ssm_conv1d.weight"][:, None],
            p + "conv1d.bias": m[b + "ssm_conv1d.bias"],
            p + "x_proj.weight": m[b + "ssm_x.weight"],
            p + "dt_proj.weight": m[b + "ssm_dt.weight"],
            p + "dt_proj.bias": m[b + "ssm_dt.bias"],
            p + "A_log": np.log(-m[b + "ssm_a"]),
            p + "D": m[b + "ssm_d"],
            p + "out_proj.weight": m[b + "ssm_out.weight"],
        }
        for name in ("dt", "b", "c"):
            if f"{b}ssm_{name}_norm.weight" in m.tensors:
                state[f"{p}{name}_layernorm.weight"] = m[f"{b}ssm_{name}_norm.weight"]


@builder("mamba", "mamba+norms")
def mamba(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    sizes = {
        "vocab_size": N_VOCAB,
        "hidden_size": k["embedding_length"],
        "num_hidden_layers": k["block_count"],
        "state_size": k["ssm.state_size"],
        "time_step_rank": k["ssm.time_step_rank"],
        "conv_kernel": k["ssm.conv_kernel"],
        "expand": k["ssm.inner_size"] // k["embedding_length"],
        "layer_norm_epsilon": k["attention.layer_norm_rms_epsilon"],
        "tie_word_embeddings": False,
    }
    if k.get("ssm.dt_b_c_rms"):
        eps = k["attention.layer_norm_rms_epsilon"]
        config = transformers.FalconMambaConfig(**sizes, mixer_rms_eps=eps)
    else:
        config = transformers.MambaConfig(**sizes)
    state = {
        "backbone.embeddings.weight": m["token_embd.weight"],
        "backbone.norm_f.weight": m["output_norm.weight"],
        "lm_head.weight": m["output.weight"],
    }
    for il in range(k["block_count"]):
        state[f"backbone.layers.{il}.norm.weight"] = m[f"blk.{il}.attn_norm.weight"]
    selections(m, state, "backbone.layers.{}.mixer.")
    return config, state


@builder("jamba")
def jamba(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    config = transformers.JambaConfig(
        **common(
            m,
            num_key_value_heads=max(k["attention.head_count_kv"]),
            num_experts=k["expert_count"],
            num_experts_per_tok=k["expert_used_count"],
            expert_layer_period=2,
            expert_layer_offset=1,
            attn_layer_period=4,
            attn_layer_offset=1,
            mamba_d_state=k["ssm.state_size"],
            mamba_d_conv=k["ssm.conv_kernel"],
            mamba_expand=k["ssm.inner_size"] // k["embedding_length"],
            mamba_dt_rank=k["ssm.time_step_rank"],
        )
    )
    names = {f"ffn_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")}
    names |= {"ffn_gate_inp": "feed_forward.router", "ffn_norm": "pre_ff_layernorm"}
    state = renamed(m, names, r"_exps\.|ssm_|^output_norm")
    state["model.final_layernorm.weight"] = m["output_norm.weight"]
    fused_experts(m, state, "feed_forward.experts")
    selections(m, state, "model.layers.{}.mamba.")
    return config, state


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


def mamba_sizes(m: Fixture) -> dict[str, Any]:
    k = m.keys
    return {
        "mamba_n_heads": k["ssm.time_step_rank"],
        "mamba_n_groups": k["ssm.group_count"],
        "mamba_d_state": k["ssm.state_size"],
        "mamba_d_conv": k["ssm.conv_kernel"],
        "mamba_d_head": k["ssm.inner_size"] // k["ssm.time_step_rank"],
        "mamba_expand": k["ssm.inner_size"] // k["embedding_length"],
    }


@builder("granitehybrid", "granitehybrid+dense")
def granitehybrid(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    kv, n_expert = k["attention.head_count_kv"], k.get("expert_count", 0)
    shared = k.get("expert_shared_feed_forward_length", k["feed_forward_length"])
    config = transformers.GraniteMoeHybridConfig(
        **common(
            m,
            num_key_value_heads=max(kv),
            intermediate_size=k["feed_forward_length"],
            rope_parameters=llama3_rope(m) if "rope_freqs.weight" in m.tensors else rope(m),
        ),
        **multipliers(m),
        **mamba_sizes(m),
        num_local_experts=n_expert,
        num_experts_per_tok=k.get("expert_used_count", 0),
        shared_intermediate_size=shared,
        layer_types=["full_attention" if n else "linear_attention" for n in kv],
        position_embedding_type="rope" if k["rope.scaling.finetuned"] else None,
    )
    state = renamed(
        m, {"ffn_gate_inp": "block_sparse_moe.router"}, r"^rope_|_exps\.|_shexp\.|ssm_|ffn_(gate|up|down)\."
    )
    halves_from_pairs(m, state)
    fused_experts(m, state, "block_sparse_moe.experts")
    suffix = "_shexp" if n_expert else ""
    for il in range(k["block_count"]):
        p, b = f"model.layers.{il}.shared_mlp.", f"blk.{il}.ffn_"
        both = [m[f"{b}{name}{suffix}.weight"] for name in ("gate", "up")]
        state[p + "input_linear.weight"] = np.concatenate(both)
        state[p + "output_linear.weight"] = m[f"{b}down{suffix}.weight"]
    scans(m, state, "model.layers.{}.mamba.")
    return config, state


@builder("falcon-h1")
def falcon_h1(m: Fixture) -> tuple[Any, State]:
    config = transformers.FalconH1Config(
        **common(m), **mamba_sizes(m), mamba_d_ssm=m.keys["ssm.inner_size"], mamba_rms_norm=False
    )
    names = {f"ffn_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")}
    state = renamed(m, names, r"ssm_|ffn_norm|^output_norm")
    state["model.final_layernorm.weight"] = m["output_norm.weight"]
    for il in range(m.keys["block_count"]):
        state[f"model.layers.{il}.pre_ff_layernorm.weight"] = m[f"blk.{il}.ffn_norm"]
    scans(m, state, "model.layers.{}.mamba.")
    return config, state


@builder("nemotron_h", "nemotron_h_moe")
def nemotron_h(m: Fixture) -> tuple[Any, State]:
    k, n_expert = m.keys, m.keys.get("expert_count", 0)
    kv, widths = k["attention.head_count_kv"], k["feed_forward_length"]
    kinds = {False: "moe" if n_expert else "mlp", True: "linear_attention"}
    arguments = common(m, num_key_value_heads=max(kv), intermediate_size=max(widths))
    experts = {
        "n_routed_experts": n_expert,
        "num_experts_per_tok": k["expert_used_count"],
        "moe_intermediate_size": k["expert_feed_forward_length"],
        "moe_shared_expert_intermediate_size": k["expert_shared_feed_forward_length"],
        "routed_scaling_factor": k["expert_weights_scale"],
    } if n_expert else {}  # fmt: skip
    for name in ("num_hidden_layers", "rms_norm_eps", "rope_parameters", "hidden_act"):
        del arguments[name]
    config = transformers.NemotronHConfig(
        **arguments,
        **experts,
        layers_block_type=[
            "full_attention" if n else kinds[not width] for n, width in zip(kv, widths, strict=True)
        ],
        ssm_state_size=k["ssm.state_size"],
        mamba_num_heads=k["ssm.time_step_rank"],
        mamba_head_dim=k["ssm.inner_size"] // k["ssm.time_step_rank"],
        n_groups=k["ssm.group_count"],
        conv_kernel=k["ssm.conv_kernel"],
        layer_norm_epsilon=k["attention.layer_norm_rms_epsilon"],
    )
    names = {f"attn_{name}": f"mixer.{name}_proj" for name in "qkv"} | {
        "attn_norm": "norm",
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
    }
    state = renamed(m, names, r"ssm_|_exps|exp_probs_b|^token_embd|^output_norm")
    state |= {
        "model.embeddings.weight": m["token_embd.weight"],
        "model.norm_f.weight": m["output_norm.weight"],
    }
    for il in layers(m, "ffn_up_exps.weight"):
        p, b = f"model.layers.{il}.mixer.", f"blk.{il}."
        state[p + "gate.e_score_correction_bias"] = m[b + "exp_probs_b.bias"]
        for name in ("up", "down"):
            state[f"{p}experts.{name}_proj"] = m[f"{b}ffn_{name}_exps.weight"]
    scans(m, state, "model.layers.{}.mixer.")
    return config, state
