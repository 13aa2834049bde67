"""Converts names, arguments and layouts from GGUF to `transformers`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from oracles.fixture import N_VOCAB, Fixture
from transformers.modeling_outputs import CausalLMOutputWithPast

State = dict[str, np.ndarray]
Builder = Callable[[Fixture], tuple[Any, State]]
BUILDERS: dict[str, Builder] = {}

# Configuration class -> function that creates its text model. The functions are for models for which
# transformers has no class, or only a class that also reads images.
MAKERS: dict[type, Callable[[Any], torch.nn.Module]] = {}


class TextModel(torch.nn.Module):
    """A text model with an output matrix and without the encoder of images."""

    def __init__(self, config: Any, class_: Any, finish: Callable[[Any, Any], Any] = lambda x, _: x) -> None:
        super().__init__()
        self.config, self.finish = config, finish
        self.model = class_._from_config(config, dtype=torch.float32)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def base_model(self) -> torch.nn.Module:
        return self.model

    def forward(self, tokens: torch.Tensor, use_cache: bool, past_key_values: Any = None) -> Any:
        out = self.model(tokens, use_cache=use_cache, past_key_values=past_key_values)
        logits = self.finish(self.lm_head(out.last_hidden_state), self.config)
        return CausalLMOutputWithPast(logits=logits, past_key_values=out.past_key_values)


NAMES = {  # A layer's tensor names in GGUF and in transformers. Builders add more names.
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
TOP = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.norm",
    "output": "lm_head",
}
SANDWICH = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
SHARED = {f"ffn_{n}_shexp": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")}
SKIP = r"_exps\.|exp_probs_b"


def builder(*names: str) -> Callable[[Builder], Builder]:
    def register(make: Builder) -> Builder:
        BUILDERS.update(dict.fromkeys(names, make))
        return make

    return register


def common(m: Fixture, **more: Any) -> dict[str, Any]:
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
    for il in layers(m, "ffn_down_exps.weight"):
        gate, up, down = (m[f"blk.{il}.ffn_{name}_exps.weight"] for name in ("gate", "up", "down"))
        state[f"model.layers.{il}.{where}.gate_up_proj"] = np.concatenate([gate, up], 1)
        state[f"model.layers.{il}.{where}.down_proj"] = down


def layers(m: Fixture, name: str) -> list[int]:
    return [il for il in range(m.keys["block_count"]) if f"blk.{il}.{name}" in m.tensors]


def halves_from_pairs(m: Fixture, state: State) -> None:
    for name, values in state.items():
        if re.search(r"self_attn\.[qk]_proj\.", name):
            heads = values.reshape(-1, m.keys["attention.key_length"] // 2, 2, *values.shape[1:])
            state[name] = heads.swapaxes(1, 2).reshape(values.shape)


def minus_one(state: State, pattern: str = r"norm\.weight$") -> None:
    for name, values in state.items():
        if re.search(pattern, name):
            state[name] = values - 1


def gate_rows(m: Fixture, state: State) -> None:
    """Reshape the gate of the shared expert, which is a vector in GGUF and a matrix of one row in
    transformers."""
    for il in layers(m, "ffn_gate_inp_shexp.weight"):
        name = f"model.layers.{il}.mlp.shared_expert_gate.weight"
        state[name] = state[name][None]


def selection_bias(m: Fixture, state: State, name: str) -> None:
    for il in layers(m, "exp_probs_b.bias"):
        state[f"model.layers.{il}.{name}"] = m[f"blk.{il}.exp_probs_b.bias"]


def kinds_by_four(m: Fixture) -> list[str]:
    return ["full_attention" if il % 4 == 3 else "sliding_attention" for il in range(m.keys["block_count"])]
