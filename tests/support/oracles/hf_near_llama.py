"""Builds the fixtures of near_llama.py as models of `transformers`. If `transformers` lacks a model's class,
another class with the same equations computes the logits.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import transformers
from oracles.fixture import Fixture
from oracles.hf_dense import HUNYUAN, llama3_rope
from oracles.hf_layer_norm import with_layer_norms
from oracles.hf_parts import State, builder, common, halves_from_pairs, renamed, rope, yarn


@builder("arcee")
def arcee(m: Fixture) -> tuple[Any, State]:
    config = transformers.ArceeConfig(**common(m, rope_parameters=llama3_rope(m), hidden_act="relu2"))
    state = renamed(m)
    halves_from_pairs(m, state)
    return config, state


def layer_normed(m: Fixture) -> dict[str, Any]:
    return with_layer_norms(m) | {"layer_norm_eps": m.keys["attention.layer_norm_epsilon"]}


@builder("jais2")
def jais2(m: Fixture) -> tuple[Any, State]:
    return transformers.Jais2Config(**layer_normed(m) | {"hidden_act": "relu2"}), renamed(m)


@builder("orion")
def orion(m: Fixture) -> tuple[Any, State]:
    arguments = layer_normed(m) | {"rope_parameters": rope(m, partial_rotary_factor=1.0)}
    del arguments["head_dim"]
    return transformers.StableLmConfig(**arguments, use_qkv_bias=False), renamed(m)


@builder("xverse")
def xverse(m: Fixture) -> tuple[Any, State]:
    state = renamed(m)
    halves_from_pairs(m, state)
    return transformers.LlamaConfig(**common(m)), state


@builder("pangu-embedded")
def pangu_embedded(m: Fixture) -> tuple[Any, State]:
    state = renamed(m)
    return transformers.LlamaConfig(**common(m), attention_bias=True), state


@builder("maincoder")
def maincoder(m: Fixture) -> tuple[Any, State]:
    state = renamed(m, HUNYUAN)
    halves_from_pairs(m, state)
    for name in [name for name in state if re.search("(query|key)_layernorm", name)]:
        state[name] = state[name].reshape(-1, 2).T.reshape(-1)
    return transformers.HunYuanDenseV1Config(**common(m)), state


@builder("hunyuan_vl")
def hunyuan_vl(m: Fixture) -> tuple[Any, State]:
    """Build the dense Hunyuan with a scaled RoPE base. HunYuanVLTextModel, which has no output matrix,
    computes the same hidden states bit by bit."""
    k = m.keys
    dim, alpha = k["attention.key_length"], k["rope.scaling.alpha"]
    scaled = rope(m) | {"rope_theta": k["rope.freq_base"] * alpha ** (dim / (dim - 2))}
    return transformers.HunYuanDenseV1Config(**common(m, rope_parameters=scaled)), renamed(m, HUNYUAN)


@builder("plamo")
def plamo(m: Fixture) -> tuple[Any, State]:
    """Build Cohere's model of dense layers, which has RMS norms, a window and RoPE on adjacent pairs."""
    n = m.keys["block_count"]
    config = transformers.Cohere2MoeConfig(
        **common(m),
        prefix_dense_intermediate_size=m.keys["feed_forward_length"],
        logit_scale=1.0,
        sliding_window=m.keys["context_length"],
        layer_types=["sliding_attention"] * n,
        mlp_layer_types=["dense"] * n,
    )
    state = renamed(m)
    for name, values in state.items():
        if re.search(r"self_attn\.[qk]_proj\.", name):
            heads = values.reshape(-1, 2, m.keys["attention.key_length"] // 2, *values.shape[1:])
            state[name] = heads.swapaxes(1, 2).reshape(values.shape)
    return config, state


@builder("plamo3")
def plamo3(m: Fixture) -> tuple[Any, State]:
    """Build Gemma 3 with a different activation function. Gemma multiplies embeddings by sqrt(n_embd), and
    norms by 1 + weight."""
    k = m.keys
    period = k["attention.sliding_window_pattern"]
    config = transformers.Gemma3TextConfig(
        **common(m, hidden_activation="silu"),
        query_pre_attn_scalar=k["attention.key_length"],
        sliding_window=k["attention.sliding_window"],
        layer_types=[
            "sliding_attention" if il % period < period - 1 else "full_attention"
            for il in range(k["block_count"])
        ],
    )
    config.rope_parameters = {
        "full_attention": yarn(m),
        "sliding_attention": rope(m) | {"rope_theta": k["rope.freq_base_swa"]},
    }
    names = {
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    plain = Fixture(m.name, m.arch, k)
    q, kv, n_ff = 4 * 16, 2 * 16, k["feed_forward_length"]
    for name, values in m.tensors.items():
        if name.endswith("attn_qkv.weight"):
            cuts = dict(zip("qkv", np.split(values, [q, q + kv]), strict=True))
            plain.tensors |= {name.replace("qkv", part): rows for part, rows in cuts.items()}
        elif name.endswith("ffn_up.weight"):
            plain.tensors[name.replace("up", "gate")], plain.tensors[name] = np.split(values, [n_ff])
        else:
            plain.tensors[f"{name}.weight" if name.endswith("norm") else name] = values
    state = renamed(plain, names)
    for name, values in state.items():
        if "norm" in name:
            state[name] = values - 1
    state["model.embed_tokens.weight"] = state["model.embed_tokens.weight"] / np.sqrt(k["embedding_length"])
    return config, state


@builder("openelm")
def openelm(m: Fixture) -> tuple[Any, State]:
    """Build Qwen3, whose layers have equal sizes. Heads and FFN columns that a layer of the fixture lacks are
    0."""
    heads, n_ff = m.keys["attention.head_count"], max(m.keys["feed_forward_length"])
    dim, most = m.keys["attention.key_length"], max(heads)
    sizes = {"attention.head_count": most, "attention.head_count_kv": most // 2, "feed_forward_length": n_ff}
    wide = Fixture(m.name, m.arch, m.keys | sizes)
    for name, values in m.tensors.items():
        if name.endswith("attn_qkv.weight"):
            n = heads[int(name.split(".")[1])] * dim
            for part, rows in zip("qkv", np.split(values, [n, n + n // 2]), strict=True):
                wide.tensors[name.replace("qkv", part)] = padded(rows, most * dim // (1 + (part != "q")), 0)
        elif name.endswith(("ffn_gate.weight", "ffn_up.weight")):
            wide.tensors[name] = padded(values, n_ff, 0)
        elif name.endswith("ffn_down.weight"):
            wide.tensors[name] = padded(values, n_ff, 1)
        else:
            wide.tensors[name] = padded(values, most * dim, 1) if "attn_output" in name else values
    return transformers.Qwen3Config(**common(wide), use_sliding_window=False), renamed(wide)


def padded(values: np.ndarray, n: int, axis: int) -> np.ndarray:
    missing = [(0, n - size if at == axis else 0) for at, size in enumerate(values.shape)]
    return np.pad(values, missing)
