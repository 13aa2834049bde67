"""EAGLE-3 heads for the fixtures of fixtures.py. The heads' logits are computed in float64 by the paper's
equations (arXiv:2503.01840)."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from oracles.fixture import N_VOCAB, Fixture
from oracles.fixtures import build
from oracles.parts import HEAD_DIM, N_EMBD

N_FF = 80
N_DRAFT = 96  # number of tokens in the draft vocabulary
STATES = [1, 2, 4]  # The last state is the residual after a model of four layers.


def eagle3(
    target: Fixture,
    *,
    n_embd: int = N_EMBD,
    n_draft: int = N_DRAFT,
    tables: Sequence[str] = ("output",),
    states: Sequence[int] = STATES,
    **keys: Any,
) -> Fixture:
    """Return a random head. `tables` says which of the matrices "token_embd" and "output" the file contains.
    If `n_draft` is 0, the draft vocabulary is the model's."""
    m = Fixture(f"eagle3 of {target.name}", "eagle3")
    n_target = target.keys["embedding_length"]
    m.keys |= {
        "block_count": 1,
        "context_length": 256,
        "embedding_length": n_embd,
        "feed_forward_length": N_FF,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": HEAD_DIM,
        "rope.freq_base": 500.0,
        "target_layers": list(states),
        "target_hidden_size": n_target,
        **keys,
    }
    for norm in ("attn_norm", "attn_norm_2", "ffn_norm"):
        m.norm(f"blk.0.{norm}", n_embd)
    for name, n_out in (("q", 4 * HEAD_DIM), ("k", 2 * HEAD_DIM), ("v", 2 * HEAD_DIM)):
        m.matrix(f"blk.0.attn_{name}", n_out, 2 * n_embd)
    m.matrix("blk.0.attn_output", n_embd, 4 * HEAD_DIM)
    for name in ("ffn_gate", "ffn_up"):
        m.matrix(f"blk.0.{name}", N_FF, n_embd)
    m.matrix("blk.0.ffn_down", n_embd, N_FF)
    m.matrix("fc", n_embd, 3 * n_target)
    if keys.get("norm_before_fc"):
        m.norm("enc.output_norm", 3 * n_target)
    m.norm("output_norm", n_embd)
    if "token_embd" in tables:
        m.matrix("token_embd", N_VOCAB, n_embd, gain=n_embd**0.5)
    if "output" in tables:
        m.matrix("output", n_draft or N_VOCAB, n_embd)
    if n_draft:
        ids = np.random.default_rng(5).permutation(N_VOCAB)[:n_draft]
        m.tensors["d2t"] = np.sort(ids).astype(np.int64)
    return m


class Reference:
    """A head in float64. Entry p of K and V is computed from g of position p and the token at position p +
    1."""

    def __init__(self, head: Fixture, target: Fixture) -> None:
        self.m, self.target = head, target
        self.eps = head.keys["attention.layer_norm_rms_epsilon"]
        self.entries: list[np.ndarray] = []

    def w(self, name: str) -> np.ndarray:
        name = f"{name}.weight"
        values = self.m.tensors[name] if name in self.m.tensors else self.target[name]
        return values.astype(np.float64)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.w(name)

    def fused(self, states: np.ndarray) -> np.ndarray:
        """Return the head's input g for the target's hidden states [n, 3 * n_embd]."""
        x = self.norm(states, "enc.output_norm") if self.m.keys.get("norm_before_fc") else states
        return x @ self.w("fc").T

    def turned(self, x: np.ndarray) -> np.ndarray:
        """Apply RoPE to x [n, heads, HEAD_DIM] of positions 0 to n - 1."""
        base = self.m.keys["rope.freq_base"]
        angle = np.arange(len(x))[:, None, None] * base ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        a, b = x[..., 0::2], x[..., 1::2]
        pairs = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
        return np.stack(pairs, -1).reshape(x.shape)

    def row(self, token: int, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Append an entry. Return the logits of the token after `token`, and the g of a further draft."""
        normed = self.norm(g, "blk.0.attn_norm_2")
        e = self.norm(self.w("token_embd")[token], "blk.0.attn_norm")
        self.entries.append(np.concatenate([e, normed]))
        entries = np.array(self.entries)
        q, k, v = (
            (entries @ self.w(f"blk.0.attn_{name}").T).reshape(len(entries), -1, HEAD_DIM) for name in "qkv"
        )
        q, k = self.turned(q)[-1], self.turned(k)
        k, v = (a.repeat(q.shape[0] // a.shape[1], 1) for a in (k, v))
        s = np.einsum("hd,khd->hk", q, k) * self.m.keys.get("attention.scale", HEAD_DIM**-0.5)
        p = np.exp(s - s.max(-1, keepdims=True))
        a = np.einsum("hk,khd->hd", p / p.sum(-1, keepdims=True), v).reshape(-1)
        x = (normed if self.m.keys.get("norm_before_residual") else g) + self.w("blk.0.attn_output") @ a
        y = self.norm(x, "blk.0.ffn_norm")
        gate, up = self.w("blk.0.ffn_gate") @ y, self.w("blk.0.ffn_up") @ y
        x = x + self.w("blk.0.ffn_down") @ (gate / (1 + np.exp(-gate)) * up)
        return self.w("output") @ self.norm(x, "output_norm"), x


def good_eagle3(name: str, gain: float, n_draft: int = N_VOCAB) -> tuple[Fixture, Fixture]:
    """Return a model and a head that is often right. The model's layers add `gain` times their results to the
    residual. The head attends only to its own position and copies the token's embedding. With a gain of 0 and
    the complete vocabulary, it computes the model's logits."""
    target = deepcopy(build(name))
    for tensor, values in target.tensors.items():
        if any(part in tensor for part in ("attn_output.", "ssm_out.", "out_proj.", "ffn_down")):
            target.tensors[tensor] = values * np.float32(gain)
    e = target.tensors["token_embd.weight"]  # all rows get equal norms and an equal first element
    e[:, 1:] *= np.sqrt((N_EMBD - 4) / (e[:, 1:] ** 2).sum(1, keepdims=True))
    e[:, 0] = 2.0
    head = eagle3(target, n_draft=n_draft, norm_before_residual=True, states=[0, 1, target.n_layer])
    head.keys |= {"attention.head_count_kv": N_EMBD // HEAD_DIM, "attention.scale": 4.0}
    eye, none = np.eye(N_EMBD, dtype=np.float32), np.zeros((N_EMBD, N_EMBD), np.float32)
    same = none.copy()  # equal queries and keys, so only RoPE makes them differ
    same[0::2, 0] = 1.0
    [norm] = [v for n, v in target.tensors.items() if n in ("output_norm.weight", "token_embd_norm.weight")]
    head.tensors |= {
        "blk.0.attn_q.weight": np.concatenate([same, none], 1),
        "blk.0.attn_k.weight": np.concatenate([same, none], 1),
        "blk.0.attn_v.weight": np.concatenate([eye, none], 1),
        "blk.0.attn_output.weight": eye,
        "blk.0.attn_norm.weight": np.ones(N_EMBD, np.float32),
        "blk.0.attn_norm_2.weight": np.zeros(N_EMBD, np.float32),
        "blk.0.ffn_down.weight": 0 * head["blk.0.ffn_down.weight"],
        "output_norm.weight": norm,
        "d2t": np.random.default_rng(6).permutation(N_VOCAB)[:n_draft],
    }
    output = target.tensors.get("output.weight", target["token_embd.weight"])
    head.tensors["output.weight"] = output[head["d2t"]]
    return target, head
