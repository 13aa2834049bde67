"""Builds the fixtures of kimi_delta.py as models of `transformers`."""

from __future__ import annotations

from typing import Any

import numpy as np
import transformers
from oracles.fixture import Fixture
from oracles.hf_parts import (
    MAKERS,
    SHARED,
    State,
    TextModel,
    builder,
    common,
    fused_experts,
    renamed,
    selection_bias,
)
from oracles.hf_recurrent import kinds_of
from transformers.models.glm5_next import Glm5NextTextConfig, modeling_glm5_next


def add_mixer(m: Fixture, state: State, il: int, rank: int, *, is_latent: bool) -> None:
    """Add the weights of layer `il`'s attention with latent vectors of size `rank`, or of its delta net."""
    p, b = f"model.layers.{il}.", f"blk.{il}."
    if is_latent:
        up = np.concatenate([m[b + "attn_k_b.weight"].swapaxes(1, 2), m[b + "attn_v_b.weight"]], 1)
        state[p + "self_attn.kv_b_proj.weight"] = up.reshape(-1, rank)
        return
    taps = [m[f"{b}ssm_conv1d_{name}.weight"][0, :, 0] for name in "qkv"]
    state[p + "self_attn.conv1d.weight"] = np.concatenate(taps)[:, None]
    state[p + "self_attn.forget_gate.A_log"] = np.log(-m[b + "ssm_a"])
    state[p + "self_attn.forget_gate.dt_bias"] = m[b + "ssm_dt.bias"]


@builder("kimi-linear")
def kimi_linear(m: Fixture) -> tuple[Any, State]:
    """Build kimi-linear. GGUF stores the up-projection of the latent as two tensors: V is [values, latent],
    and K is transposed, [latent, keys]."""
    k = m.keys
    size, rank, shared = (
        k["attention.value_length_mla"],
        k["attention.kv_lora_rank"],
        k["rope.dimension_count"],
    )
    arguments = common(m, num_key_value_heads=k["attention.head_count"])
    del arguments["rope_parameters"], arguments["head_dim"]
    config = transformers.KimiLinearConfig(
        **arguments,
        num_local_experts=k["expert_count"],
        num_experts_per_tok=k["expert_used_count"],
        moe_intermediate_size=k["expert_feed_forward_length"],
        n_shared_experts=k["expert_shared_count"],
        routed_scaling_factor=k["expert_weights_scale"],
        norm_topk_prob=True,
        kv_lora_rank=rank,
        qk_rope_head_dim=shared,
        qk_nope_head_dim=k["attention.key_length_mla"] - shared,
        v_head_dim=size,
        linear_head_dim=k["kda.head_dim"],
        linear_num_heads=k["attention.head_count"],
        linear_conv_kernel_dim=k["ssm.conv_kernel"],
        layer_types=kinds_of(m),
        mlp_layer_types=["sparse" if il else "dense" for il in range(k["block_count"])],
    )
    mine = {
        f"ssm_{n}_{i}": f"self_attn.{g}{n}_{i}_proj"
        for n, g in (("f", "forget_gate."), ("g", ""))
        for i in "ab"
    }
    mine |= {"ssm_beta": "self_attn.b_proj", "ssm_norm": "self_attn.o_norm"}
    mine |= {"attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm"}
    state = renamed(m, SHARED | mine, r"_exps\.|ssm_a$|ssm_dt|ssm_conv1d|exp_probs_b|attn_[kv]_b")
    fused_experts(m, state)
    for il in range(k["block_count"]):
        p, b = f"model.layers.{il}.", f"blk.{il}."
        if il:
            state[p + "mlp.gate.e_score_correction_bias"] = m[b + "exp_probs_b.bias"]
        add_mixer(m, state, il, rank, is_latent=bool(il % 2))
    return config, state


@builder("bailingmoe3")
def bailingmoe3(m: Fixture) -> tuple[Any, State]:
    k, n = m.keys, m.n_layer
    size, rank, shared = (
        k["attention.value_length_mla"],
        k["attention.kv_lora_rank"],
        k["rope.dimension_count"],
    )
    kinds = ["full_attention" if n_kv else "linear_attention" for n_kv in k["attention.head_count_kv"][:n]]
    config = transformers.BailingHybridConfig(
        **common(m, num_hidden_layers=n, num_key_value_heads=4, head_dim=k["kda.head_dim"]),
        num_local_experts=k["expert_count"],
        num_experts_per_tok=k["expert_used_count"],
        moe_intermediate_size=k["expert_feed_forward_length"],
        n_shared_experts=1,
        n_group=k["expert_group_count"],
        topk_group=k["expert_group_used_count"],
        routed_scaling_factor=k["expert_weights_scale"],
        norm_topk_prob=True,
        first_k_dense_replace=k["leading_dense_block_count"],
        kv_lora_rank=rank,
        qk_rope_head_dim=shared,
        qk_nope_head_dim=k["attention.key_length_mla"] - shared,
        v_head_dim=size,
        kda_lower_bound=k["kda.gate_lower_bound"],
        layer_types=kinds,
        num_mtp_layers=0,
    )
    mine = {"ssm_f_a": "self_attn.forget_gate.f_proj", "ssm_g_a": "self_attn.g_proj"}
    mine |= {"ssm_beta": "self_attn.b_proj", "ssm_norm": "self_attn.o_norm", "attn_gate": "self_attn.g_proj"}
    mine |= {"attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm"}
    skip = rf"_exps\.|ssm_a$|ssm_dt|ssm_conv1d|exp_probs_b|attn_[kv]_b|blk\.{n}\."
    state = renamed(m, SHARED | mine, skip)
    fused_experts(m, state)
    for il, kind in enumerate(kinds):
        p, b = f"model.layers.{il}.", f"blk.{il}."
        if il:
            state[p + "mlp.gate.e_score_correction_bias"] = m[b + "exp_probs_b.bias"]
        if kind == "full_attention":
            up = np.concatenate([m[b + "attn_k_b.weight"].swapaxes(1, 2), m[b + "attn_v_b.weight"]], 1)
            state[p + "self_attn.kv_b_proj.weight"] = up.reshape(-1, rank)
            continue
        taps = [m[f"{b}ssm_conv1d_{name}.weight"][0, :, 0] for name in "qkv"]
        state[p + "self_attn.conv1d.weight"] = np.concatenate(taps)[:, None]
        state[p + "self_attn.forget_gate.A_log"] = np.log(m[b + "ssm_a"][:, 0])
        state[p + "self_attn.forget_gate.dt_bias"] = m[b + "ssm_dt.bias"]
    return config, {name: v for name, v in state.items() if not name.startswith(f"model.layers.{n}.")}


@builder("glm5-next")
def glm5_next(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    arguments = common(m, num_key_value_heads=k["attention.head_count"])
    del arguments["rope_parameters"], arguments["head_dim"]
    rank, index = k["attention.kv_lora_rank"], "attention.indexer."
    config = Glm5NextTextConfig(
        **arguments,
        n_routed_experts=k["expert_count"],
        num_experts_per_tok=k["expert_used_count"],
        moe_intermediate_size=k["expert_feed_forward_length"],
        n_shared_experts=k["expert_shared_count"],
        routed_scaling_factor=k["expert_weights_scale"],
        q_lora_rank=k["attention.q_lora_rank"],
        kv_lora_rank=rank,
        qk_rope_head_dim=0,
        qk_nope_head_dim=k["attention.key_length_mla"],
        v_head_dim=k["attention.value_length_mla"],
        index_n_heads=k[f"{index}head_count"],
        index_head_dim=k[f"{index}key_length"],
        index_topk=k[f"{index}top_k"],
        index_kpool=k[f"{index}kpool"],
        indexer_types=["full" if full else "shared" for full in k[f"{index}types"]],
        linear_head_dim=k["kda.head_dim"],
        linear_num_heads=k["attention.head_count"],
        linear_conv_kernel_dim=k["ssm.conv_kernel"],
        linear_lower_bound=k["kda.gate_lower_bound"],
        layer_types=["indexed_attention" if n else "linear_attention" for n in k["attention.head_count_kv"]],
        mlp_layer_types=["sparse" if il else "dense" for il in range(k["block_count"])],
        swiglu_limit=k["swiglu_clamp_exp"][0],
        hc_mult=k["hyper_connection.count"],
        hc_sinkhorn_iters=k["hyper_connection.sinkhorn_iterations"],
        hc_eps=k["hyper_connection.epsilon"],
    )
    names = {
        f"ssm_{n}_{i}": f"self_attn.{g}{n}_{i}_proj"
        for n, g in (("f", "forget_gate."), ("g", ""))
        for i in "ab"
    } | {
        "ssm_beta": "self_attn.b_proj", "ssm_norm": "self_attn.o_norm", "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "indexer.attn_q_b": "self_attn.indexer.wq_b", "indexer.attn_k": "self_attn.indexer.wk",
        "indexer.k_norm": "self_attn.indexer.k_norm", "indexer.proj": "self_attn.indexer.weights_proj",
    }  # fmt: skip
    skip = r"_exps\.|ssm_a$|ssm_dt|ssm_conv1d|exp_probs_b|attn_[kv]_b|hc_|indexer_compressor"
    state = renamed(m, SHARED | names, skip)
    fused_experts(m, state)
    selection_bias(m, state, "mlp.gate.e_score_correction_bias")
    for il, n_kv in enumerate(k["attention.head_count_kv"]):
        p, b = f"model.layers.{il}.", f"blk.{il}."
        for part in ("attn", "ffn"):
            for name in ("fn", "base", "scale"):
                state[f"{p}{part}_hc.{name}"] = m[f"{b}hc_{part}_{name}.weight"]
        for name in ("gate", "ape"):
            if (stored := f"{b}indexer_compressor_{name}.weight") in m.tensors:
                state[f"{p}self_attn.indexer.index_kpool_compress_{name}"] = m[stored]
        add_mixer(m, state, il, rank, is_latent=bool(n_kv))
    return config, state


MAKERS[Glm5NextTextConfig] = lambda config: TextModel(config, modeling_glm5_next.Glm5NextTextModel)
