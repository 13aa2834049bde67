"""Builds the fixtures of alibi.py as models of `transformers`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from oracles.fixture import N_VOCAB, Fixture
from oracles.hf_earlier import in_blocks
from oracles.hf_parts import MAKERS, State, builder, common, halves_from_pairs, renamed, rope


class AlibiConfig(transformers.LlamaConfig):
    model_type = "llama_with_alibi"


class Alibi(transformers.LlamaForCausalLM):
    """A Llama whose positions are all 0, so RoPE changes nothing, and whose mask adds -slope * distance."""

    def forward(self, input_ids: Any, past_key_values: Any = None, use_cache: bool = True) -> Any:
        n, n_before = input_ids.shape[1], past_key_values.get_seq_length() if past_key_values else 0
        distance = torch.arange(n_before, n_before + n)[:, None] - torch.arange(n_before + n)
        n_head = self.config.num_attention_heads
        assert n_head & (n_head - 1) == 0, n_head
        slopes = 2.0 ** (-8.0 / n_head * torch.arange(1, n_head + 1))
        bias = -slopes[:, None, None] * distance
        mask = torch.where(distance < 0, torch.finfo(torch.float32).min, bias)
        return super().forward(
            input_ids,
            attention_mask=mask[None],
            position_ids=torch.zeros((1, n), dtype=torch.int64),
            past_key_values=past_key_values,
            use_cache=use_cache,
        )


MAKERS[AlibiConfig] = Alibi


@builder("mpt")
def mpt(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    config = transformers.MptConfig(
        vocab_size=N_VOCAB,
        d_model=k["embedding_length"],
        n_heads=k["attention.head_count"],
        n_layers=k["block_count"],
        max_seq_len=k["context_length"],
        layer_norm_epsilon=k["attention.layer_norm_epsilon"],
        attn_config={
            "clip_qkv": k["attention.clamp_kqv"],
            "alibi_bias_max": int(k["attention.max_alibi_bias"]),
        },
    )
    names = {"attn_norm": "norm_1", "ffn_norm": "norm_2", "attn_qkv": "attn.Wqkv"}
    names |= {"attn_output": "attn.out_proj", "ffn_up": "ffn.up_proj", "ffn_down": "ffn.down_proj"}
    top = {"token_embd": "wte", "output_norm": "norm_f"}
    state = in_blocks(m, names, top, "transformer.blocks", grouped=False)
    return config, state | {"lm_head.weight": m["token_embd.weight"]}


@builder("bloom")
def bloom(m: Fixture) -> tuple[Any, State]:
    k = m.keys
    config = transformers.BloomConfig(
        vocab_size=N_VOCAB,
        hidden_size=k["embedding_length"],
        n_head=k["attention.head_count"],
        n_layer=k["block_count"],
        layer_norm_epsilon=k["attention.layer_norm_epsilon"],
    )
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    names |= {"attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense"}
    names |= {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
    top = {"token_embd": "word_embeddings", "token_embd_norm": "word_embeddings_layernorm"}
    state = in_blocks(m, names, top | {"output_norm": "ln_f"}, "transformer.h")
    return config, state | {"lm_head.weight": m["token_embd.weight"]}


@builder("refact", "baichuan", "baichuan+alibi")
def llama(m: Fixture) -> tuple[Any, State]:
    head_dim = m.keys["embedding_length"] // m.keys["attention.head_count"]
    m.keys.setdefault("attention.key_length", head_dim)
    m.keys.setdefault("rope.freq_base", 10_000.0)
    state = renamed(m)
    if m.arch == "baichuan":  # Files without RoPE have interleaved rows too.
        halves_from_pairs(m, state)
    if m.name == "baichuan":
        return transformers.LlamaConfig(**common(m)), state
    return AlibiConfig(**common(m, rope_parameters=rope(m))), {n: np.asarray(v) for n, v in state.items()}
