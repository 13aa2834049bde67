"""Builds the fixtures of uneven.py as models of `transformers`."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
import transformers
from oracles.fixture import Fixture
from oracles.hf_parts import MAKERS, State, TextModel, builder, common, halves_from_pairs, renamed, rope
from oracles.hf_sigmoid_mixtures import LLAMA3, kinds
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from transformers.models.muse_glimmer import modeling_muse_glimmer


class DeciConfig(transformers.LlamaConfig):
    """llama with a list of (heads, kv heads, FFN columns)."""

    sizes: list[tuple[int, int, int]] | None = None


class _Mixer(torch.nn.Module):
    """Replaces the attention of a layer by zeros or by one matrix."""

    def __init__(self, n_embd: int, mixes: bool) -> None:
        super().__init__()
        self.o_proj = torch.nn.Linear(n_embd, n_embd, bias=False) if mixes else None

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return (self.o_proj(hidden_states) if self.o_proj else torch.zeros_like(hidden_states)), None


class _Nothing(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def make_deci(config: Any) -> torch.nn.Module:
    network = transformers.LlamaForCausalLM(config)
    for il, (layer, (n_head, n_kv, n_ff)) in enumerate(zip(network.model.layers, config.sizes, strict=True)):
        c = copy(config)
        c.num_key_value_heads, c.intermediate_size = n_kv, n_ff
        layer.self_attn = LlamaAttention(c, il) if n_kv else _Mixer(config.hidden_size, n_head > 0)
        layer.mlp = LlamaMLP(c) if n_ff else _Nothing()
        if not n_head:
            layer.input_layernorm = torch.nn.Identity()
        if not n_ff:
            layer.post_attention_layernorm = torch.nn.Identity()
    return network.float()


@builder("deci")
def deci(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    names = "attention.head_count", "attention.head_count_kv", "feed_forward_length"
    one = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    config = DeciConfig(**common(m, rope_parameters=rope(m, "llama3", **LLAMA3), **one))
    config.sizes = list(zip(*(k[name] for name in names), strict=True))
    state = renamed(m)
    halves_from_pairs(m, state)
    return config, {name: v for name, v in state.items() if "rope_freqs" not in name}


def soft_capped(x: Any, config: Any) -> Any:
    cap = config.final_logit_softcapping
    return cap * torch.tanh(x * config.output_multiplier / cap)


@builder("muse-glimmer")
def muse_glimmer(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    local = k["attention.sliding_window_pattern"]
    config = transformers.MuseGlimmerTextConfig(
        **common(m),
        sliding_window=k["attention.sliding_window"],
        layer_types=kinds(m),
        layer_rope_theta=[k["rope.freq_base"] if windowed else 0 for windowed in local],
        qk_scale_factor=float(m["blk.0.attn_q_norm.weight"][0]),
        output_multiplier=k["logit_scale"],
        final_logit_softcapping=k["final_logit_softcapping"],
    )
    names = {
        "attn_gate": "self_attn.gate_proj",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    state = renamed(m, names, "attn_[qk]_norm")
    halves_from_pairs(m, state)
    for name in state:
        if "layernorm" in name:
            state[name] = state[name] - 1
    return config, state


MAKERS[DeciConfig] = make_deci
MAKERS[transformers.MuseGlimmerTextConfig] = lambda config: TextModel(
    config, modeling_muse_glimmer.MuseGlimmerTextModel, soft_capped
)
