"""A llama forward in float64 numpy over the dequantized weights of a GGUF file: the whole-model oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vkbackend.formats import dequantize
from vkbackend.models.gguf import GGUF


def forward(path: Path, tokens: list[int], cache: type = np.float64) -> np.ndarray:
    """Logits float64 [n_tokens, n_vocab]; K and V are rounded to the type `cache`."""
    with GGUF.open(path) as gguf:
        w = {
            t.name: dequantize(gguf.data(t.name), t.type, t.shape).astype(np.float64)
            for t in gguf.tensors.values()
        }
        get = lambda key: gguf.get(f"llama.{key}")  # noqa: E731
        n_layer, heads, kv_heads = (
            get("block_count"),
            get("attention.head_count"),
            get("attention.head_count_kv"),
        )
        eps, base = get("attention.layer_norm_rms_epsilon"), get("rope.freq_base")
    hd = w["blk.0.attn_q.weight"].shape[0] // heads
    n = len(tokens)
    angle = np.arange(n)[:, None] * base ** (-np.arange(0, hd, 2) / hd)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]  # [n, 1, hd / 2]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w[name]

    def rope(x: np.ndarray) -> np.ndarray:
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    h = w["token_embd.weight"][tokens]
    for il in range(n_layer):
        p = f"blk.{il}."
        x = norm(h, p + "attn_norm.weight")
        q = rope((x @ w[p + "attn_q.weight"].T).reshape(n, heads, hd))
        k = rope((x @ w[p + "attn_k.weight"].T).reshape(n, kv_heads, hd)).astype(cache).astype(np.float64)
        v = (x @ w[p + "attn_v.weight"].T).reshape(n, kv_heads, hd).astype(cache).astype(np.float64)
        k, v = (a.repeat(heads // kv_heads, 1) for a in (k, v))
        s = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(hd)
        s = np.where(np.tril(np.ones((n, n), bool)), s, -np.inf)
        p_ = np.exp(s - s.max(-1, keepdims=True))
        a = np.einsum("hqk,khd->qhd", p_ / p_.sum(-1, keepdims=True), v).reshape(n, -1)
        h = h + a @ w[p + "attn_output.weight"].T
        x = norm(h, p + "ffn_norm.weight")
        gate, up = x @ w[p + "ffn_gate.weight"].T, x @ w[p + "ffn_up.weight"].T
        h = h + (gate / (1 + np.exp(-gate)) * up) @ w[p + "ffn_down.weight"].T
    return norm(h, "output_norm.weight") @ w.get("output.weight", w["token_embd.weight"]).T
