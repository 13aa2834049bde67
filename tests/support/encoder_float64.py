"""BERT-like encoders in float64, an oracle for families that only llama.cpp supports. llama.cpp's GELU has
errors of 1e-4. The formulas come from the papers that models/architectures names.
"""

from __future__ import annotations

import numpy as np
from oracles.fixture import PROMPT, Fixture

from vkbackend.models.architectures.alibi import slopes_of

Array = np.ndarray


def hidden(m: Fixture) -> Array:
    """Return the hidden states of the prompt, [n_tokens, n_embd]."""
    k, n = m.keys, len(PROMPT)
    t = {name: values.astype(np.float64) for name, values in m.tensors.items()}
    eps, n_head = k["attention.layer_norm_epsilon"], k["attention.head_count"]

    def norm(x: Array, name: str) -> Array:
        x = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + eps)
        return x * t[f"{name}.weight"] + t[f"{name}.bias"]

    def linear(x: Array, name: str) -> Array:
        return x @ t[f"{name}.weight"].T + t.get(f"{name}.bias", 0.0)

    h = (
        t["token_embd.weight"][PROMPT]
        + t["token_types.weight"].reshape(-1, len(t["token_embd.weight"][0]))[0]
    )
    h = norm(h, "token_embd_norm")
    distance = np.abs(np.arange(n)[:, None] - np.arange(n))
    slopes = np.array([*slopes_of(n_head, k.get("attention.max_alibi_bias", 0.0))])
    bias = -slopes[:, None, None] * distance if "attention.max_alibi_bias" in k else 0.0
    for il in range(k["block_count"]):
        p = f"blk.{il}."
        q, key, v = (linear(h, f"{p}attn_{name}").reshape(n, n_head, -1).transpose(1, 0, 2) for name in "qkv")
        if "rope.freq_base" in k:
            q, key = rotated(q, k["rope.freq_base"]), rotated(key, k["rope.freq_base"])
        score = q @ key.transpose(0, 2, 1) / np.sqrt(q.shape[-1]) + bias
        p_of = np.exp(score - score.max(axis=-1, keepdims=True))
        a = (p_of / p_of.sum(axis=-1, keepdims=True)) @ v
        a = linear(a.transpose(1, 0, 2).reshape(n, -1), p + "attn_output")
        h = norm(h + a, p + "attn_output_norm")
        h = norm(h + ffn(h, p, t, linear, k), p + "layer_output_norm")
    return h


def ffn(x: Array, p: str, t: dict[str, Array], linear: object, k: dict[str, object]) -> Array:
    assert callable(linear)
    if p + "ffn_gate_inp.weight" in t:
        logits = x @ t[p + "ffn_gate_inp.weight"].T
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        y = np.zeros_like(x)
        for row, chosen in enumerate(np.argsort(-weights, axis=1)[:, : k["expert_used_count"]]):
            for e in chosen:
                up = gelu(x[row] @ t[p + "ffn_up_exps.weight"][e].T)
                y[row] += weights[row, e] * (up @ t[p + "ffn_down_exps.weight"][e].T)
        return y
    up = linear(x, p + "ffn_up")
    act = gelu(linear(x, p + "ffn_gate")) * up if p + "ffn_gate.weight" in t else gelu(up)
    return linear(act, p + "ffn_down")  # type: ignore[no-any-return]


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def rotated(x: Array, base: float) -> Array:
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * base ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
