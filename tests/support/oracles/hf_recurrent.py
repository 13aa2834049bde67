"""Builds the fixtures of recurrent.py as models of `transformers`."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import transformers
from oracles.fixture import Fixture
from oracles.hf_parts import (
    MAKERS,
    SHARED,
    SKIP,
    State,
    TextModel,
    builder,
    common,
    experts_of,
    fused_experts,
    gate_rows,
    layers,
    minus_one,
    renamed,
    rope,
    selection_bias,
)
from transformers.models.glm5_next import Glm5NextTextConfig, modeling_glm5_next
from transformers.models.qwen4_exp import Qwen4ExpTextConfig, modeling_qwen4_exp


def by_key_head(m: Fixture, il: int, values: np.ndarray) -> np.ndarray:
    return values.reshape(m.keys["ssm.group_count"], -1, *values.shape[1:])


def kinds_of(m: Fixture) -> list[str]:
    return ["full_attention" if il % 2 else "linear_attention" for il in range(m.keys["block_count"])]


def delta_net_sizes(m: Fixture) -> dict[str, Any]:
    k = m.keys
    return {
        "linear_conv_kernel_dim": k["ssm.conv_kernel"],
        "linear_key_head_dim": k["ssm.state_size"],
        "linear_value_head_dim": k["ssm.state_size"],
        "linear_num_key_heads": k["ssm.group_count"],
        "linear_num_value_heads": k["ssm.time_step_rank"],
        "layer_types": kinds_of(m),
    }


def delta_net_vectors(m: Fixture, state: State, il: int) -> None:
    p, b = f"model.layers.{il}.linear_attn.", f"blk.{il}."
    state[p + "conv1d.weight"] = m[b + "ssm_conv1d.weight"][:, None]
    state[p + "dt_bias"] = m[b + "ssm_dt.bias"]
    state[p + "A_log"] = np.log(-m[b + "ssm_a"])
    state[p + "norm.weight"] = m[b + "ssm_norm.weight"]
    state[p + "out_proj.weight"] = m[b + "ssm_out.weight"]


@builder("qwen3next")
def qwen3next(m: Fixture) -> tuple[Any, State]:
    config = transformers.Qwen3NextConfig(
        **common(m, rope_parameters=rope(m, partial_rotary_factor=0.5)),
        **experts_of(m),
        **delta_net_sizes(m),
        shared_expert_intermediate_size=m.keys["expert_shared_feed_forward_length"],
        norm_topk_prob=True,
        decoder_sparse_step=1,
    )
    names = {"post_attention_norm": "post_attention_layernorm"}
    state = renamed(m, names, r"_exps\.|ssm_|attn_qkv|attn_gate")
    fused_experts(m, state)
    gate_rows(m, state)
    minus_one(state)
    for il in layers(m, "ssm_a"):
        delta_net_vectors(m, state, il)
        width = m.keys["ssm.state_size"] * m.keys["ssm.group_count"]
        q, k, v = np.split(m[f"blk.{il}.attn_qkv.weight"], [width, 2 * width])
        z = m[f"blk.{il}.attn_gate.weight"]
        parts = [by_key_head(m, il, part) for part in (q, k, v, z)]
        p = f"model.layers.{il}.linear_attn."
        state[p + "in_proj_qkvz.weight"] = np.concatenate(parts, 1).reshape(-1, z.shape[1])
        state[p + "in_proj_ba.weight"] = m[f"blk.{il}.ssm_ba.weight"]
    return config, state


def grouped(m: Fixture, values: np.ndarray, axis: int = 0) -> np.ndarray:
    """Reorder value heads from tiled order to the grouped order of transformers. Value head h reads key head
    h % n in tiled order, and key head h // r in grouped order."""
    n_k, n_v = m.keys["ssm.group_count"], m.keys["ssm.time_step_rank"]
    values = np.moveaxis(values, axis, 0)
    heads = values.reshape(n_v // n_k, n_k, -1, *values.shape[1:])
    return np.moveaxis(heads.swapaxes(0, 1).reshape(values.shape), 0, axis)


def qwen35_state(m: Fixture, skip: str = "") -> State:
    state = renamed(
        m, {"post_attention_norm": "post_attention_layernorm"}, rf"_exps\.|ssm_|attn_qkv|attn_gate{skip}"
    )
    minus_one(state)
    keys = 2 * m.keys["ssm.state_size"] * m.keys["ssm.group_count"]
    for il in layers(m, "ssm_a"):
        p, b = f"model.layers.{il}.linear_attn.", f"blk.{il}."
        both, taps = m[b + "attn_qkv.weight"], m[b + "ssm_conv1d.weight"]
        state |= {
            p + "in_proj_qkv.weight": np.concatenate([both[:keys], grouped(m, both[keys:])]),
            p + "conv1d.weight": np.concatenate([taps[:keys], grouped(m, taps[keys:])])[:, None],
            p + "in_proj_z.weight": grouped(m, m[b + "attn_gate.weight"]),
            p + "in_proj_a.weight": grouped(m, m[b + "ssm_alpha.weight"]),
            p + "in_proj_b.weight": grouped(m, m[b + "ssm_beta.weight"]),
            p + "dt_bias": grouped(m, m[b + "ssm_dt.bias"]),
            p + "A_log": np.log(-grouped(m, m[b + "ssm_a"])),
            p + "norm.weight": m[b + "ssm_norm.weight"],
            p + "out_proj.weight": grouped(m, m[b + "ssm_out.weight"], 1),
        }
    return state


def qwen35_rope(m: Fixture) -> dict[str, Any]:
    sections = m.keys["rope.dimension_sections"][:3]
    return rope(m, partial_rotary_factor=0.5, mrope_section=sections, mrope_interleaved=True)


@builder("qwen35")
def qwen35(m: Fixture) -> tuple[Any, State]:
    config = transformers.Qwen3_5TextConfig(
        **common(m, rope_parameters=qwen35_rope(m)), **delta_net_sizes(m), partial_rotary_factor=0.5
    )
    return config, qwen35_state(m)


@builder("qwen35moe")
def qwen35moe(m: Fixture) -> tuple[Any, State]:
    config = transformers.Qwen3_5MoeTextConfig(
        **common(m, rope_parameters=qwen35_rope(m)),
        **experts_of(m),
        **delta_net_sizes(m),
        shared_expert_intermediate_size=m.keys["expert_shared_feed_forward_length"],
        partial_rotary_factor=0.5,
    )
    state = qwen35_state(m)
    gate_rows(m, state)
    for il in range(m.keys["block_count"]):
        for name in ("gate_up", "down"):
            state[f"model.layers.{il}.mlp.experts.{name}_proj"] = m[f"blk.{il}.ffn_{name}_exps.weight"]
    return config, state


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
        if il % 2:
            up = np.concatenate([m[b + "attn_k_b.weight"].swapaxes(1, 2), m[b + "attn_v_b.weight"]], 1)
            state[p + "self_attn.kv_b_proj.weight"] = up.reshape(-1, rank)
            continue
        taps = [m[f"{b}ssm_conv1d_{name}.weight"][0, :, 0] for name in "qkv"]
        state[p + "self_attn.conv1d.weight"] = np.concatenate(taps)[:, None]
        state[p + "self_attn.forget_gate.A_log"] = np.log(-m[b + "ssm_a"])
        state[p + "self_attn.forget_gate.dt_bias"] = m[b + "ssm_dt.bias"]
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


@builder("lfm2", "lfm2moe")
def lfm2(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    kinds = ["full_attention" if n else "conv" for n in k["attention.head_count_kv"]]
    arguments = common(m, num_key_value_heads=max(k["attention.head_count_kv"]))
    for name in ("head_dim", "hidden_act"):
        del arguments[name]
    arguments |= {"norm_eps": arguments.pop("rms_norm_eps"), "conv_L_cache": k["shortconv.l_cache"]}
    arguments |= {"layer_types": kinds}
    names = {
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
        "shortconv.conv": "conv.conv",
        "ffn_gate_inp": "feed_forward.gate",
    }
    names |= {f"ffn_{n}": f"feed_forward.w{i}" for n, i in (("gate", 1), ("down", 2), ("up", 3))}
    state = renamed(m, names, SKIP)
    for name in [name for name in state if name.endswith(".conv.conv.weight")]:
        state[name] = state[name][:, None]
    if m.arch == "lfm2":
        return transformers.Lfm2Config(**arguments, block_auto_adjust_ff_dim=False), state
    fused_experts(m, state, "feed_forward.experts")
    selection_bias(m, state, "feed_forward.expert_bias")
    config = transformers.Lfm2MoeConfig(
        **arguments, **experts_of(m), num_dense_layers=k["leading_dense_block_count"], norm_topk_prob=True
    )
    return config, state


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
        if n_kv:
            up = np.concatenate([m[b + "attn_k_b.weight"].swapaxes(1, 2), m[b + "attn_v_b.weight"]], 1)
            state[p + "self_attn.kv_b_proj.weight"] = up.reshape(-1, rank)
            continue
        taps = [m[f"{b}ssm_conv1d_{name}.weight"][0, :, 0] for name in "qkv"]
        state[p + "self_attn.conv1d.weight"] = np.concatenate(taps)[:, None]
        state[p + "self_attn.forget_gate.A_log"] = np.log(-m[b + "ssm_a"])
        state[p + "self_attn.forget_gate.dt_bias"] = m[b + "ssm_dt.bias"]
    return config, state


MAKERS[Glm5NextTextConfig] = lambda config: TextModel(config, modeling_glm5_next.Glm5NextTextModel)


@builder("qwen4exp")
def qwen4exp(m: Fixture) -> tuple[Any, State]:
    k, n_stream = m.keys, m.keys["hyper_connection.count"]
    index = "attention.indexer."
    config = Qwen4ExpTextConfig(
        **common(m, rope_parameters=qwen35_rope(m), eos_token_id=k["ple.eos_token_id"]),
        **experts_of(m),
        **delta_net_sizes(m),
        shared_expert_intermediate_size=k["expert_shared_feed_forward_length"],
        partial_rotary_factor=0.5,
        hc_count=n_stream,
        hc_lowrank=k["hyper_connection.low_rank"],
        ple_layer_ids=[il + 1 for il in k["ple.layers"]],
        ple_conv_kernel_size=k["ple.conv_kernel"],
        ngram_size=k["ple.ngram_size"],
        heads_per_ngram=k["ple.heads_per_ngram"],
        ngram_vocab_size_base=50,
        make_ngram_vocab_size_divisible_by=16,
        indexer_n_heads=k[f"{index}head_count"],
        indexer_kv_heads=1,
        indexer_head_dim=k[f"{index}key_length"],
        indexer_budget=k[f"{index}top_k"],
        indexer_compress_ratio=max(k["attention.compress_ratios"]),
        output_gate_type="sigmoid",
    )
    state = qwen35_state(m, r"|hc_|ple_|per_layer|indexer")
    gate_rows(m, state)
    streams = {"norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up",
               "inject": "block_inject_weight"}  # fmt: skip
    for name, values in m.tensors.items():
        if found := re.fullmatch(r"(?:blk\.(\d+)\.|output_)hc_?(attn|ffn)?_(\w+)\.weight", name):
            where = "model.hyper_connection_mixer"
            if found[1]:
                part = {"attn": "attn", "ffn": "mlp"}[found[2]]
                where = f"model.layers.{found[1]}.{part}_hyper_connection"
            state[f"{where}.{streams[found[3]]}.weight"] = values - (found[3] == "norm")
    for il in range(k["block_count"]):
        p, b = f"model.layers.{il}.", f"blk.{il}."
        for name in ("gate_up", "down"):
            state[f"{p}mlp.experts.{name}_proj"] = m[f"{b}ffn_{name}_exps.weight"]
        if b + "indexer.q_proj.weight" in m.tensors:
            both = [m[f"{b}indexer.{name}_proj.weight"] for name in "qk"]
            state[p + "self_attn.indexer.index_qk_proj.weight"] = np.concatenate(both)
            for name in "qk":
                norm = m[f"{b}indexer.{name}_norm.weight"] - 1
                state[f"{p}self_attn.indexer.{name}_layernorm.weight"] = norm
    [il] = k["ple.layers"]
    p, b = f"model.layers.{il}.ple.", f"blk.{il}.ple_"
    table = "ple_embedding."
    state |= {
        f"{p}key_proj.weight": m[b + "key.weight"],
        f"{p}value_proj.weight": m[b + "value.weight"],
        f"{p}conv1d.weight": m[b + "conv1d.weight"][:, None],
        f"{p}{table}ngram_embedding.weight": m["per_layer_token_embd.weight"],
        f"{p}{table}layer_multipliers": np.array(k["ple.layer_multipliers"]),
        f"{p}{table}ngram_heads_vocab_sizes": np.array(k["ple.head_vocab_sizes"]),
        f"{p}{table}ngram_heads_offsets": np.array(k["ple.head_offsets"]),
    }
    for name in ("key", "query", "conv"):
        state[f"{p}norm_{name}.weight"] = m[f"{b}norm_{name}.weight"] - 1
    return config, state


MAKERS[Qwen4ExpTextConfig] = lambda config: TextModel(config, modeling_qwen4_exp.Qwen4ExpTextModel)
