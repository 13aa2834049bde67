"""Parts that fixtures share: the registry, common keys, attention, feed-forward layers, experts.

A fixture has more layers than a period of its layer pattern, windows shorter than the prompt, and GQA or MQA.
A fixture uses two of eight experts, and its biases change the logits. The sizes are small enough for a
software driver.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

import numpy as np
from oracles.fixture import N_VOCAB, Fixture

N_EMBD, HEAD_DIM, N_FF, N_EXPERT, N_FF_EXP = 64, 16, 96, 8, 32
BUILDERS: dict[str, Callable[[Fixture], None]] = {}


def fixture(name: str) -> Callable[[Callable[[Fixture], None]], Callable[[Fixture], None]]:
    def register(make: Callable[[Fixture], None]) -> Callable[[Fixture], None]:
        BUILDERS[name] = make
        return make

    return register


def base(m: Fixture, n_layer: int, n_head: int = 4, n_kv: int | list[int] = 2, **keys: Any) -> None:
    m.keys |= {
        "block_count": n_layer,
        "context_length": 256,
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_kv,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": HEAD_DIM,
        "rope.freq_base": 1000.0,
        **{key.replace("__", "."): value for key, value in keys.items()},
    }
    n_embd = m.keys["embedding_length"]
    m.matrix("token_embd", N_VOCAB, n_embd, gain=sqrt(n_embd))
    m.norm("output_norm", n_embd)
    m.matrix("output", N_VOCAB, n_embd)


def tied(m: Fixture, gain: float) -> None:
    del m.tensors["output.weight"]
    m.tensors["token_embd.weight"] *= np.float32(gain)


def attention(
    m: Fixture, il: int, *, bias: str = "", head_norms: bool = False, norm: str = "attn_norm"
) -> None:
    """Add the attention of a layer. `bias` names the projections with a bias, as letters of "qkvo"."""
    p, n_embd = f"blk.{il}.", m.keys["embedding_length"]
    n_head, n_kv = m.keys["attention.head_count"], m.keys["attention.head_count_kv"]
    head_dim = m.keys["attention.key_length"]
    m.norm(p + norm, n_embd)
    m.matrix(p + "attn_q", n_head * head_dim, n_embd, gain=1.5, bias="q" in bias)
    m.matrix(p + "attn_k", n_kv * head_dim, n_embd, gain=1.5, bias="k" in bias)
    m.matrix(p + "attn_v", n_kv * head_dim, n_embd, bias="v" in bias)
    m.matrix(p + "attn_output", n_embd, n_head * head_dim, bias="o" in bias)
    if head_norms:
        m.norm(p + "attn_q_norm", head_dim)
        m.norm(p + "attn_k_norm", head_dim)


def feed_forward(
    m: Fixture, il: int, *, bias: bool = False, norm: str = "ffn_norm", suffix: str = ""
) -> None:
    p, n_embd, n_ff = f"blk.{il}.", m.keys["embedding_length"], m.keys["feed_forward_length"]
    if norm:
        m.norm(p + norm, n_embd)
    if suffix:
        n_ff = m.keys.get("expert_shared_feed_forward_length", N_FF_EXP)
    m.matrix(f"{p}ffn_gate{suffix}", n_ff, n_embd, bias=bias)
    m.matrix(f"{p}ffn_up{suffix}", n_ff, n_embd, bias=bias)
    m.matrix(f"{p}ffn_down{suffix}", n_embd, n_ff, gain=2.0, bias=bias)


def mixture(m: Fixture, il: int, *, bias: bool = False, norm: str = "ffn_norm", gain: float = 3.0) -> None:
    p = f"blk.{il}."
    if norm:
        m.norm(p + norm, N_EMBD)
    m.matrix(p + "ffn_gate_inp", N_EXPERT, N_EMBD, gain=gain, bias=bias)
    m.matrix(p + "ffn_gate_exps", N_EXPERT, N_FF_EXP, N_EMBD, bias=bias)
    m.matrix(p + "ffn_up_exps", N_EXPERT, N_FF_EXP, N_EMBD, bias=bias)
    m.matrix(p + "ffn_down_exps", N_EXPERT, N_EMBD, N_FF_EXP, gain=2.0, bias=bias)


EXPERTS: dict[str, Any] = {
    "expert_count": N_EXPERT,
    "expert_used_count": 2,
    "expert_feed_forward_length": N_FF_EXP,
}


def selection_bias(m: Fixture, il: int) -> None:
    m.put(f"blk.{il}.exp_probs_b.bias", m.normal(f"blk.{il}.exp_probs_b", N_EXPERT) / 8)


def fuse_experts(m: Fixture, il: int) -> None:
    p = f"blk.{il}.ffn_"
    parts = [m.tensors.pop(f"{p}{name}_exps.weight") for name in ("gate", "up")]
    m.put(p + "gate_up_exps.weight", np.concatenate(parts, 1))


def wide_norms(m: Fixture, il: int) -> None:
    for name, n in (("q", m.keys["attention.head_count"]), ("k", m.keys["attention.head_count_kv"])):
        m.norm(f"blk.{il}.attn_{name}_norm", n * HEAD_DIM)
