"""Builds the fixtures of latent.py as models of `transformers`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import transformers
from oracles.fixture import Fixture
from oracles.hf_parts import SHARED, SKIP, State, builder, common, fused_experts, renamed, rope, yarn


def latent_arguments(m: Fixture) -> dict[str, Any]:
    k, mla = m.keys, latent_suffix(m)
    shared = k["rope.dimension_count"]
    arguments = common(m, num_key_value_heads=k["attention.head_count"])
    del arguments["head_dim"]
    if "rope.scaling.type" in k:
        heat = {"llama_4_scaling_beta": k["attention.temperature_scale"]} if m.arch == "mistral4" else {}
        scaled = yarn(m, mscale=1.0, mscale_all_dim=10 * k["rope.scaling.yarn_log_multiplier"], **heat)
        arguments["rope_parameters"] = scaled
    return arguments | {
        "n_routed_experts": k["expert_count"],
        "num_experts_per_tok": k["expert_used_count"],
        "moe_intermediate_size": k["expert_feed_forward_length"],
        "n_shared_experts": k["expert_shared_count"],
        "routed_scaling_factor": k["expert_weights_scale"],
        "first_k_dense_replace": k["leading_dense_block_count"],
        "kv_lora_rank": k["attention.kv_lora_rank"],
        "q_lora_rank": k.get("attention.q_lora_rank"),
        "qk_rope_head_dim": shared,
        "qk_nope_head_dim": k["attention.key_length" + mla] - shared,
        "v_head_dim": k["attention.value_length" + mla],
        "n_group": k.get("expert_group_count", 1),
        "topk_group": k.get("expert_group_used_count", 1),
    }


def latent_suffix(m: Fixture) -> str:
    return "_mla" if "attention.key_length_mla" in m.keys else ""


def latent_state(m: Fixture, more: dict[str, str] | None = None) -> State:
    names = SHARED | {
        "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    }  # fmt: skip
    state = renamed(m, names | (more or {}), r"_exps\.|exp_probs_b|\.attn_k?v?_b")
    fused_experts(m, state)
    for il in range(m.keys["block_count"]):
        p, b = f"model.layers.{il}.", f"blk.{il}."
        if b + "exp_probs_b.bias" in m.tensors:
            state[p + "mlp.gate.e_score_correction_bias"] = m[b + "exp_probs_b.bias"]
        if not latent_suffix(m):
            state[p + "self_attn.kv_b_proj.weight"] = m[b + "attn_kv_b.weight"]
            continue
        up = np.concatenate([m[b + "attn_k_b.weight"].swapaxes(1, 2), m[b + "attn_v_b.weight"]], 1)
        state[p + "self_attn.kv_b_proj.weight"] = up.reshape(-1, m.keys["attention.kv_lora_rank"])
    return state


@builder("deepseek2", "deepseek2+heads", "deepseek2+softmax", "mistral4")
def deepseek2(m: Fixture) -> tuple[Any, State]:
    arguments = latent_arguments(m)
    if m.arch == "mistral4":
        config = transformers.Mistral4Config(**arguments, norm_topk_prob=True)
    elif m.keys["expert_gating_func"] == 2:
        config = transformers.DeepseekV3Config(**arguments, norm_topk_prob=True)
    else:
        config = transformers.DeepseekV2Config(**arguments, norm_topk_prob=False, topk_method="greedy")
    return config, latent_state(m)


@builder("minicpm3")
def minicpm3(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    config = transformers.MiniCPM3Config(
        **common(m, head_dim=None),
        kv_lora_rank=k["attention.kv_lora_rank"],
        q_lora_rank=k["attention.q_lora_rank"],
        qk_rope_head_dim=k["rope.dimension_count"],
        qk_nope_head_dim=k["attention.key_length"] - k["rope.dimension_count"],
        v_head_dim=k["attention.value_length"],
        scale_emb=12,
        scale_depth=1.4,
        dim_model_base=256,
    )
    return config, latent_state(m)


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


@builder("hy_v4")
def hy_v4(m: Fixture) -> tuple[Any, State]:
    """Build Hunyuan 4. RoPE pairs adjacent elements in llama.cpp and in the authors' vLLM, but pairs the two
    halves in transformers."""
    k = m.keys
    n, shared = k["block_count"], k["rope.dimension_count"]
    config = transformers.HYV4Config(
        **latent_arguments(m),
        mlp_layer_types=["sparse" if il else "dense" for il in range(n)],
        index_topk=k["attention.indexer.top_k"],
        index_head_dim=k["attention.indexer.key_length"],
        index_n_heads=k["attention.indexer.head_count"],
        indexer_types=["full" if full else "shared" for full in k["attention.indexer.types"]],
        hc_mult=k["hyper_connection.count"],
        hc_magnitude=k["hyper_connection.magnitude"],
        hc_eps=k["hyper_connection.epsilon"],
        swiglu_limit=k["swiglu_clamp_exp"][0],
    )
    names = {"attn_gate": "self_attn.gate_proj", "attn_sinks": "self_attn.sinks"}
    names |= {f"indexer.{ours}": f"self_attn.indexer.{theirs}" for ours, theirs in NAMES.items()}
    for part in ("attn", "ffn"):
        names |= {f"hc_{part}_{of}": f"{part}_hc.{of}" for of in ("fn", "base", "scale")}
    m = replace(m, tensors={**m.tensors})
    outer = {of: m.tensors.pop(f"output_hc_{of}.weight") for of in ("fn", "base", "scale")}
    state = {
        re.sub(r"(sinks|_hc\.\w+)\.weight$", r"\1", name): values
        for name, values in latent_state(m, names).items()
    }
    state |= {f"model.hc_head.hc_{of}": values for of, values in outer.items()}
    for name, values in state.items():
        width = {"q_b_proj.weight": k["attention.key_length_mla"], "kv_a_proj_with_mqa.weight": len(values)}
        index_keys = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias")
        width |= dict.fromkeys(index_keys, k["attention.indexer.key_length"])
        if size := width.get(name.split("self_attn.")[-1].removeprefix("indexer.")):
            heads = values.reshape(-1, size, *values.shape[1:]).copy()
            last = heads[:, -shared:].reshape(len(heads), shared // 2, 2, *values.shape[1:])
            heads[:, -shared:] = last.swapaxes(1, 2).reshape(heads[:, -shared:].shape)
            state[name] = heads.reshape(values.shape)
    return config, state


@builder("deepseek4", "deepseek4+short")
def deepseek4(m: Fixture) -> tuple[Any, State]:
    k, index = m.keys, "attention.indexer."
    ratios = k["attention.compress_ratios"]
    long = next(n for n in ratios if n not in (0, 4))
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", long: "heavily_compressed_attention"}
    size, n_rot = k["attention.key_length"], k["rope.dimension_count"]
    n_hashed = k["hash_layer_count"]
    arguments = common(m)
    scaled = yarn(m) | {"rope_theta": k["attention.compress_rope_freq_base"], "attention_factor": 1.0}
    part = {"partial_rotary_factor": n_rot / size}
    arguments["rope_parameters"] = {"main": rope(m) | part, "compress": scaled | part}
    del arguments["intermediate_size"]
    config = transformers.DeepseekV4Config(
        **arguments,
        **part,
        moe_intermediate_size=k["expert_feed_forward_length"],
        n_routed_experts=k["expert_count"],
        num_experts_per_tok=k["expert_used_count"],
        n_shared_experts=k["expert_shared_count"],
        routed_scaling_factor=k["expert_weights_scale"],
        q_lora_rank=k["attention.q_lora_rank"],
        o_groups=k["attention.output_group_count"],
        o_lora_rank=k["attention.output_lora_rank"],
        sliding_window=k["attention.sliding_window"],
        layer_types=[kinds[n] for n in ratios],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": long},
        mlp_layer_types=["hash_moe"] * n_hashed + ["moe"] * (len(ratios) - n_hashed),
        index_n_heads=k[f"{index}head_count"],
        index_head_dim=k[f"{index}key_length"],
        index_topk=k[f"{index}top_k"],
        hc_mult=k["hyper_connection.count"],
        hc_sinkhorn_iters=k["hyper_connection.sinkhorn_iterations"],
        hc_eps=k["hyper_connection.epsilon"],
        swiglu_limit=k["swiglu_clamp_exp"][0],
    )
    indexer = "self_attn.compressor.indexer"
    names = {
        "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_norm",
        "attn_q_b": "self_attn.q_b_proj", "attn_kv": "self_attn.kv_proj",
        "attn_kv_a_norm": "self_attn.kv_norm", "attn_output_a": "self_attn.o_a_proj",
        "attn_output_b": "self_attn.o_b_proj", "indexer.attn_q_b": f"{indexer}.q_b_proj",
        "indexer.proj": f"{indexer}.scorer.weights_proj",
    }  # fmt: skip
    for ours, theirs in (("attn_compressor", "self_attn.compressor"), ("indexer_compressor", indexer)):
        names |= {f"{ours}_{n}": f"{theirs}.{n}_proj" for n in ("kv", "gate")}
        names[f"{ours}_norm"] = f"{theirs}.kv_norm"
    skip = SKIP + r"|hc_|_ape|attn_sinks|tid2eid"
    state = renamed(m, SHARED | names, skip)
    fused_experts(m, state)
    state |= {f"model.hc_head.hc_{n}": m[f"output_hc_{n}.weight"] for n in ("fn", "base", "scale")}
    for il, ratio in enumerate(ratios):
        p, b = f"model.layers.{il}.", f"blk.{il}."
        state[p + "self_attn.sinks"] = m[b + "attn_sinks.weight"]
        for part_of in ("attn", "ffn"):
            for name in ("fn", "base", "scale"):
                state[f"{p}{part_of}_hc.{name}"] = m[f"{b}hc_{part_of}_{name}.weight"]
        if ratio:
            state[p + "self_attn.compressor.position_bias"] = m[b + "attn_compressor_ape.weight"]
        if ratio == 4:
            state[f"{p}{indexer}.position_bias"] = m[b + "indexer_compressor_ape.weight"]
        if il < n_hashed:
            state[p + "mlp.gate.tid2eid"] = m[b + "ffn_gate_tid2eid.weight"].astype(np.int64)
        else:
            state[p + "mlp.gate.e_score_correction_bias"] = m[b + "exp_probs_b.bias"]
    return config, state
