"""Builds the fixtures of recurrent.py as models of `transformers`."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import transformers
from oracles.fixture import Fixture
from oracles.hf_parts import (
    MAKERS,
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
