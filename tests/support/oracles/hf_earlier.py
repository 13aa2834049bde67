"""Builds the fixtures of earlier.py as models of `transformers`. For architectures that transformers lacks,
another class computes the same logits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import transformers
from oracles.fixture import N_VOCAB, Fixture
from oracles.hf_dense import llama3_rope, multipliers
from oracles.hf_layer_norm import with_layer_norms
from oracles.hf_parts import State, builder, common, halves_from_pairs, minus_one, renamed, rope

FUSED = {"attn_qkv": "self_attn.query_key_value", "attn_output": "self_attn.dense"}


def split_qkv(m: Fixture) -> Fixture:
    m = replace(m, keys={**m.keys}, tensors={**m.tensors})
    k = m.keys
    k.setdefault("attention.head_count_kv", k["attention.head_count"])
    k.setdefault("attention.key_length", k["embedding_length"] // k["attention.head_count"])
    n_kv = k["attention.head_count_kv"] * k["attention.key_length"]
    for name in [name for name in m.tensors if "attn_qkv" in name]:
        fused = m.tensors.pop(name)
        at = len(fused) - 2 * n_kv
        for letter, part in zip("qkv", np.split(fused, [at, at + n_kv]), strict=True):
            m.tensors[name.replace("qkv", letter)] = part
    return m


def per_group(m: Fixture, fused: np.ndarray) -> np.ndarray:
    """Return rows of q, k and v grouped by kv heads. Files store all rows of q first."""
    k = m.keys
    n_kv = k.get("attention.head_count_kv", k["attention.head_count"])
    size = k["embedding_length"] // k["attention.head_count"]
    parts = np.split(fused, [len(fused) - 2 * n_kv * size, len(fused) - n_kv * size])
    grouped = [part.reshape(n_kv, -1, *fused.shape[1:]) for part in parts]
    return np.concatenate(grouped, 1).reshape(fused.shape)


@builder("internlm2")
def llama(m: Fixture) -> tuple[Any, State]:
    state = renamed(m)
    halves_from_pairs(m, state)
    return transformers.LlamaConfig(**common(m)), state


@builder("exaone")
def exaone(m: Fixture) -> tuple[Any, State]:
    return transformers.LlamaConfig(**common(m, rope_parameters=llama3_rope(m))), renamed(m)


@builder("qwen")
def qwen(m: Fixture) -> tuple[Any, State]:
    m = split_qkv(m)
    width = m.keys["feed_forward_length"] // 2
    return transformers.Qwen2Config(**common(m, intermediate_size=width)), renamed(m)


@builder("chatglm")
def chatglm(m: Fixture) -> tuple[Any, State]:
    m = split_qkv(m)
    arguments = common(m, rope_parameters=rope(m, partial_rotary_factor=0.5))
    return transformers.GlmConfig(**arguments, attention_bias=True), renamed(
        m, {"ffn_up": "mlp.gate_up_proj"}
    )


@builder("minicpm")
def minicpm(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    scaled = rope(
        m,
        "longrope",
        long_factor=m["rope_factors_long.weight"].tolist(),
        short_factor=m["rope_factors_short.weight"].tolist(),
        factor=1.0,
        original_max_position_embeddings=k["context_length"],
    )
    state = renamed(m)
    halves_from_pairs(m, state)
    with_scale = replace(m, keys={**k, "attention.scale": k["attention.key_length"] ** -0.5})
    return transformers.GraniteConfig(**common(m, rope_parameters=scaled), **multipliers(with_scale)), state


@builder("bitnet", "bitnet+relu2")
def bitnet(m: Fixture) -> tuple[Any, State]:
    names = {"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"}
    arguments = common(m, hidden_act=m.keys.get("hidden_activation", "silu"))
    del arguments["head_dim"]
    return transformers.BitNetConfig(**arguments), renamed(m, names)


@builder("olmo")
def olmo(m: Fixture) -> tuple[Any, State]:
    arguments = with_layer_norms(m)
    del arguments["head_dim"]
    state = renamed(m)
    halves_from_pairs(m, state)
    return transformers.OlmoConfig(**arguments, clip_qkv=m.keys["attention.clamp_kqv"]), state


@builder("phi2")
def phi2(m: Fixture) -> tuple[Any, State]:
    arguments = with_layer_norms(m) | {
        "hidden_act": "gelu_new",
        "layer_norm_eps": m.keys["attention.layer_norm_epsilon"],
        "rope_parameters": rope(m, partial_rotary_factor=0.5),
    }
    del arguments["head_dim"]
    names = {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
    state = {
        name.replace("model.norm.", "model.final_layernorm."): values
        for name, values in renamed(m, names).items()
    }
    return transformers.PhiConfig(**arguments), state


@builder("nemotron")
def nemotron(m: Fixture) -> tuple[Any, State]:
    arguments = with_layer_norms(m) | {
        "hidden_act": "relu2",
        "norm_eps": m.keys["attention.layer_norm_epsilon"],
        "rope_parameters": rope(m, partial_rotary_factor=0.5),
    }
    state = renamed(m)
    minus_one(state)
    return transformers.NemotronConfig(**arguments), state


@builder("falcon", "falcon+norms")
def falcon(m: Fixture) -> tuple[Any, State]:
    k, two = m.keys, "blk.0.attn_norm_2.weight" in m.tensors
    config = transformers.FalconConfig(
        vocab_size=N_VOCAB,
        hidden_size=k["embedding_length"],
        num_hidden_layers=k["block_count"],
        num_attention_heads=k["attention.head_count"],
        num_kv_heads=k["attention.head_count_kv"],
        ffn_hidden_size=k["feed_forward_length"],
        layer_norm_epsilon=k["attention.layer_norm_epsilon"],
        rope_parameters=rope(m),
        new_decoder_architecture=two,
        multi_query=True,
        parallel_attn=True,
        bias=False,
        tie_word_embeddings="output.weight" not in m.tensors,
    )
    names = {"attn_norm": "ln_mlp" if two else "input_layernorm", "attn_norm_2": "ln_attn"}
    names |= {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
    top = {"token_embd": "word_embeddings", "output_norm": "ln_f"}
    state = in_blocks(m, names | FUSED, top, "transformer.h", {"self_attn": "self_attention"})
    state.setdefault("lm_head.weight", m["token_embd.weight"])
    return config, state


def in_blocks(
    m: Fixture,
    names: dict[str, str],
    top: dict[str, str],
    where: str,
    parts: dict[str, str] | None = None,
    grouped: bool = True,
) -> State:
    """Rename tensors, and group the rows of fused tensors by kv heads if `grouped`."""
    state = {}
    for name, values in m.tensors.items():
        *layer, stem, kind = name.split(".")
        if layer:
            for part, other in (parts or {}).items():
                names = names | {stem: names[stem].replace(f"{part}.", f"{other}.")}
            values = per_group(m, values) if grouped and stem == "attn_qkv" else values
            state[f"{where}.{layer[1]}.{names[stem]}.{kind}"] = values
        elif stem == "output":
            state[f"lm_head.{kind}"] = values
        else:
            state[f"{where.split('.')[0]}.{top[stem]}.{kind}"] = values
    return state


@builder("gptneox", "gptneox+serial")
def gptneox(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    config = transformers.GPTNeoXConfig(
        vocab_size=N_VOCAB,
        hidden_size=k["embedding_length"],
        intermediate_size=k["feed_forward_length"],
        num_hidden_layers=k["block_count"],
        num_attention_heads=k["attention.head_count"],
        layer_norm_eps=k["attention.layer_norm_epsilon"],
        rope_parameters=rope(m, partial_rotary_factor=0.25),
        use_parallel_residual=k["use_parallel_residual"],
        max_position_embeddings=k["context_length"],
    )
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    names |= {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
    top = {"token_embd": "embed_in", "output_norm": "final_layer_norm"}
    return config, in_blocks(m, names | FUSED, top, "gpt_neox.layers", {"self_attn": "attention"})


@builder("starcoder")
def starcoder(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    config = transformers.GPTBigCodeConfig(
        vocab_size=N_VOCAB,
        n_positions=k["context_length"],
        n_embd=k["embedding_length"],
        n_layer=k["block_count"],
        n_head=k["attention.head_count"],
        n_inner=k["feed_forward_length"],
        layer_norm_epsilon=k["attention.layer_norm_epsilon"],
    )
    names = {"attn_norm": "ln_1", "ffn_norm": "ln_2", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj"}
    names |= {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
    top = {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f"}
    state = in_blocks(m, names, top, "transformer.h")
    return config, state | {"lm_head.weight": m["token_embd.weight"]}


@builder("codeshell")
def codeshell(m: Fixture) -> tuple[Any, State]:
    m = split_qkv(m)
    arguments = with_layer_norms(m) | {"hidden_act": "gelu_pytorch_tanh"}
    del arguments["head_dim"]
    config = transformers.Starcoder2Config(
        **arguments, norm_epsilon=m.keys["attention.layer_norm_epsilon"], use_bias=True, sliding_window=None
    )
    return config, renamed(m, {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"})
