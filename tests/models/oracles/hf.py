"""Hugging Face `transformers` as an oracle: the tensors of a fixture in the model class that the architecture
comes from, float32, eager attention.

Every function below undoes what the conversion to GGUF did: names, the interleaving of llama's q and k rows,
the one that norms of some families leave out, fused projections.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import transformers
from models.oracles.fixture import N_VOCAB, Fixture
from models.oracles.fixtures import LLAMA3

State = dict[str, np.ndarray]
BUILDERS: dict[str, Callable[[Fixture], tuple[Any, State]]] = {}

NAMES = {  # of a layer, GGUF to transformers; what is not here keeps to a builder
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def versions() -> str:
    return f"transformers {version('transformers')}, torch {version('torch')}"


def logits(fixture: Fixture, batches: Sequence[Sequence[int]]) -> np.ndarray:
    """Logits of every token of consecutive batches, float32 [n_tokens, n_vocab]."""
    return run(model(fixture), batches)


def model(fixture: Fixture) -> Any:
    config, state = BUILDERS[fixture.name](fixture)
    config._attn_implementation = "eager"
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in state.items()}
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    missing = made.load_state_dict(tensors, strict=True)
    assert not missing.missing_keys and not missing.unexpected_keys
    return made


@torch.no_grad()
def run(made: Any, batches: Sequence[Sequence[int]]) -> np.ndarray:
    cache, rows = None, []
    for tokens in batches:
        out = made(torch.tensor([list(tokens)]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        rows.append(out.logits[0].numpy())
    return np.concatenate(rows)


# ---- parts ----


def builder(*names: str) -> Callable[[Callable[[Fixture], tuple[Any, State]]], Any]:
    def register(make: Callable[[Fixture], tuple[Any, State]]) -> Any:
        BUILDERS.update(dict.fromkeys(names, make))
        return make

    return register


def common(m: Fixture, **more: Any) -> dict[str, Any]:
    """The arguments that every configuration takes."""
    k = m.keys
    return {
        "vocab_size": N_VOCAB,
        "hidden_size": k["embedding_length"],
        "intermediate_size": k["feed_forward_length"],
        "num_hidden_layers": k["block_count"],
        "num_attention_heads": k["attention.head_count"],
        "num_key_value_heads": k["attention.head_count_kv"],
        "head_dim": k["attention.key_length"],
        "rms_norm_eps": k["attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": k["context_length"],
        "rope_parameters": rope(m),
        "tie_word_embeddings": "output.weight" not in m.tensors,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "hidden_act": "silu",
    } | more


def rope(m: Fixture, kind: str = "default", **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": m.keys["rope.freq_base"]} | more


def yarn(m: Fixture, **more: Any) -> dict[str, Any]:
    get = lambda key, default: m.keys.get(f"rope.scaling.{key}", default)  # noqa: E731
    return rope(
        m,
        "yarn",
        factor=get("factor", None),
        original_max_position_embeddings=get("original_context_length", None),
        beta_fast=get("yarn_beta_fast", 32.0),
        beta_slow=get("yarn_beta_slow", 1.0),
        **more,
    )


def experts_of(m: Fixture) -> dict[str, Any]:
    return {
        "num_experts": m.keys["expert_count"],
        "num_experts_per_tok": m.keys["expert_used_count"],
        "moe_intermediate_size": m.keys["expert_feed_forward_length"],
    }


def renamed(m: Fixture, names: dict[str, str] | None = None, skip: str = r"^rope_|_exps\.|ssm_") -> State:
    """The tensors under their names in transformers; `skip` is for a builder to add."""
    names, state = NAMES | (names or {}), {}
    for name, values in m.tensors.items():
        if re.search(skip, name):
            continue
        layer = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        stem, dot, kind = (layer[2] if layer else name).rpartition(".")
        new = f"model.layers.{layer[1]}.{names[stem]}" if layer else TOP[stem]
        state[f"{new}{dot}{kind}"] = values
    return state


def fused_experts(m: Fixture, state: State, where: str = "mlp.experts") -> None:
    """Gate and up stacked: [expert, gate rows then up rows, n_embd]."""
    for il in layers(m, "ffn_down_exps.weight"):
        gate, up, down = (m[f"blk.{il}.ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
        state[f"model.layers.{il}.{where}.gate_up_proj"] = np.concatenate([gate, up], 1)
        state[f"model.layers.{il}.{where}.down_proj"] = down


def layers(m: Fixture, name: str) -> list[int]:
    """The layers that have a tensor."""
    return [il for il in range(m.keys["block_count"]) if f"blk.{il}.{name}" in m.tensors]


def halves_from_pairs(m: Fixture, state: State) -> None:
    """llama's q and k rows: the GGUF has rotated pairs side by side, transformers half a head apart."""
    for name, values in state.items():
        if re.search(r"self_attn\.[qk]_proj\.", name):
            heads = values.reshape(-1, m.keys["attention.key_length"] // 2, 2, *values.shape[1:])
            state[name] = heads.swapaxes(1, 2).reshape(values.shape)


def minus_one(state: State, pattern: str = r"norm\.weight$") -> None:
    """Norms that transformers multiplies with 1 + weight."""
    for name, values in state.items():
        if re.search(pattern, name):
            state[name] = values - 1


# ---- architectures ----


@builder("llama", "llama+longrope")
def llama(m: Fixture) -> tuple[Any, State]:
    scaled = rope(
        m,
        "llama3",
        factor=LLAMA3["factor"],
        low_freq_factor=LLAMA3["low_freq_factor"],
        high_freq_factor=LLAMA3["high_freq_factor"],
        original_max_position_embeddings=int(LLAMA3["original"]),
    )
    if "rope_freqs.weight" not in m.tensors:
        scaled = longrope(m)
    biased = "blk.0.attn_q.bias" in m.tensors
    config = transformers.LlamaConfig(
        **common(m, rope_parameters=scaled, attention_bias=biased, mlp_bias=biased)
    )
    state = renamed(m)
    halves_from_pairs(m, state)
    return config, state


def longrope(m: Fixture, **more: Any) -> dict[str, Any]:
    return rope(
        m,
        "longrope",
        long_factor=m["rope_factors_long.weight"].tolist(),
        short_factor=m["rope_factors_short.weight"].tolist(),
        factor=m.keys["context_length"] / m.keys["rope.scaling.original_context_length"],
        original_max_position_embeddings=m.keys["rope.scaling.original_context_length"],
        **more,
    )


@builder("llama+experts")
def mixtral(m: Fixture) -> tuple[Any, State]:
    config = transformers.MixtralConfig(
        **common(m), num_local_experts=m.keys["expert_count"], num_experts_per_tok=2, sliding_window=None
    )
    state = renamed(m)
    halves_from_pairs(m, state)
    fused_experts(m, state)
    return config, state


@builder("mistral3")
def mistral3(m: Fixture) -> tuple[Any, State]:
    scaled = yarn(
        m, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=m.keys["attention.temperature_scale"]
    )
    state = renamed(m)
    halves_from_pairs(m, state)
    return transformers.Ministral3Config(**common(m, rope_parameters=scaled)), state


@builder("qwen2")
def qwen2(m: Fixture) -> tuple[Any, State]:
    return transformers.Qwen2Config(**common(m), use_sliding_window=False), renamed(m)


@builder("qwen2moe")
def qwen2moe(m: Fixture) -> tuple[Any, State]:
    config = transformers.Qwen2MoeConfig(
        **common(m),
        **experts_of(m),
        shared_expert_intermediate_size=m.keys["expert_shared_feed_forward_length"],
        norm_topk_prob=False,
        use_sliding_window=False,
    )
    state = renamed(m)
    fused_experts(m, state)
    gate_rows(m, state)
    return config, state


def gate_rows(m: Fixture, state: State) -> None:
    """The shared expert's gate is a vector in GGUF, a matrix of one row in transformers."""
    for il in layers(m, "ffn_gate_inp_shexp.weight"):
        name = f"model.layers.{il}.mlp.shared_expert_gate.weight"
        state[name] = state[name][None]


@builder("qwen3")
def qwen3(m: Fixture) -> tuple[Any, State]:
    return transformers.Qwen3Config(**common(m), use_sliding_window=False), renamed(m)


@builder("qwen3moe")
def qwen3moe(m: Fixture) -> tuple[Any, State]:
    config = transformers.Qwen3MoeConfig(**common(m), **experts_of(m), norm_topk_prob=True)
    state = renamed(m)
    fused_experts(m, state)
    return config, state


@builder("phi3", "phi3+short")
def phi3(m: Fixture) -> tuple[Any, State]:
    part = m.keys["rope.dimension_count"] / m.keys["attention.key_length"]
    scaled = longrope(m, partial_rotary_factor=part)
    original = scaled["original_max_position_embeddings"]
    config = transformers.Phi3Config(
        **common(m, rope_parameters=scaled), original_max_position_embeddings=original, sliding_window=None
    )
    return config, renamed(m, {"ffn_up": "mlp.gate_up_proj"})


SANDWICH = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}


@builder("gemma3")
def gemma3(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    every = {
        "full_attention": rope(m, "linear", factor=k["rope.scaling.factor"]),
        "sliding_attention": rope(m) | {"rope_theta": k["rope.freq_base_swa"]},
    }
    kinds = ["full_attention" if il % 6 == 5 else "sliding_attention" for il in range(k["block_count"])]
    config = transformers.Gemma3TextConfig(
        **common(m, rope_parameters=every),
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=k["attention.sliding_window"],
        layer_types=kinds,
        query_pre_attn_scalar=k["attention.key_length"],
        final_logit_softcapping=k["final_logit_softcapping"],
    )
    state = renamed(m, SANDWICH | {"ffn_norm": "pre_feedforward_layernorm"})
    minus_one(state)
    return config, state


@builder("glm4")
def glm4(m: Fixture) -> tuple[Any, State]:
    config = transformers.Glm4Config(
        **common(m, rope_parameters=rope(m, partial_rotary_factor=0.5)), attention_bias=True
    )
    names = {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    }
    return config, renamed(m, names)


@builder("glm4moe")
def glm4moe(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    last = k["block_count"] - k["nextn_predict_layers"]
    config = transformers.Glm4MoeConfig(
        **common(m, rope_parameters=rope(m, partial_rotary_factor=0.5), num_hidden_layers=last),
        n_routed_experts=k["expert_count"],
        num_experts_per_tok=k["expert_used_count"],
        moe_intermediate_size=k["expert_feed_forward_length"],
        n_shared_experts=k["expert_shared_count"],
        routed_scaling_factor=k["expert_weights_scale"],
        first_k_dense_replace=k["leading_dense_block_count"],
        norm_topk_prob=k["expert_weights_norm"],
        n_group=1,
        topk_group=1,
        attention_bias=True,
        use_qk_norm=True,
    )
    shared = {f"ffn_{n}_shexp": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")}
    skip = rf"blk\.{last}\.|_exps\.|exp_probs_b"
    state = renamed(m, shared | {"post_attention_norm": "post_attention_layernorm"}, skip)
    fused_experts(m, state)
    for il in layers(m, "exp_probs_b.bias"):
        state[f"model.layers.{il}.mlp.gate.e_score_correction_bias"] = m[f"blk.{il}.exp_probs_b.bias"]
    return config, {name: v for name, v in state.items() if f".{last}." not in name}


@builder("gpt-oss")
def gpt_oss(m: Fixture) -> tuple[Any, State]:
    """`truncate`: GGUF has no key for whole bounds of the YaRN ramp, and llama.cpp always takes them."""
    k = m.keys
    n_layer = k["block_count"]
    config = transformers.GptOssConfig(
        **common(
            m,
            rope_parameters=yarn(m, truncate=True),
            intermediate_size=k["expert_feed_forward_length"],
        ),
        num_local_experts=k["expert_count"],
        num_experts_per_tok=k["expert_used_count"],
        sliding_window=k["attention.sliding_window"],
        layer_types=["full_attention" if il % 2 else "sliding_attention" for il in range(n_layer)],
        attention_bias=True,
    )
    names = {"ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm"}
    state = renamed(m, names, r"_exps\.|attn_sinks")
    for il in range(n_layer):
        p, b = f"model.layers.{il}.", f"blk.{il}.ffn_"
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            gate, up = m[f"{b}gate_exps.{kind}"], m[f"{b}up_exps.{kind}"]
            both = np.stack([gate, up], 2).reshape(len(gate), -1, *gate.shape[2:])  # rows alternate
            state[f"{p}mlp.experts.gate_up_proj{suffix}"] = both.swapaxes(1, -1) if kind == "weight" else both
        state[f"{p}mlp.experts.down_proj"] = m[f"{b}down_exps.weight"].swapaxes(1, 2)
        state[f"{p}mlp.experts.down_proj_bias"] = m[f"{b}down_exps.bias"]
        state[f"{p}self_attn.sinks"] = m[f"blk.{il}.attn_sinks.weight"]
    return config, state


# ---- recurrent layers ----


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
