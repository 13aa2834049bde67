"""An oracle that computes complete llama, qwen2, qwen3 and qwen3moe models in float64 numpy on dequantized
weights. RoPE depends on the architecture. Biases, head norms and experts depend on the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vkbackend.formats import dequantize
from vkbackend.models.gguf.reader import GGUF

ADJACENT_PAIRS = ("llama",)


def components(n_pairs: int, sections: Sequence[int]) -> list[int]:
    """For each pair of Qwen3-VL's RoPE, return whether time, height or width rotates the pair. The three
    alternate."""
    return [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(n_pairs)]


def forward(
    path: Path,
    tokens: list[int],
    cache: type = np.float64,
    ids: Sequence[np.ndarray] | None = None,
    windows: Sequence[int] = (),
    owners: Sequence[int] = (),
    control: Mapping[int, np.ndarray] | None = None,
    squares: dict[str, np.ndarray] | None = None,
    states: list[np.ndarray] | None = None,
    images: Mapping[int, np.ndarray] | None = None,
    positions: np.ndarray | None = None,
    both_ways: bool = False,
) -> np.ndarray:
    """Return logits, float64 [n_tokens, n_vocab]. K and V are rounded to the type `cache`. Some arguments
    have one entry per layer. `ids` contains the experts to use, [n_tokens, n_used]. `windows` contains the
    number of positions that a token attends to (0: all). `owners` contains the layer whose K and V are read.
    `control` contains vectors to add to the residual after each layer. For each matrix, `squares` receives
    the sum over all tokens of x * x, where x is the matrix's input. `states` receives the residual before
    each layer and after the last. `images` maps the first token of an image to its rows [n, n_embd * (1 +
    deepstack layers)], and `positions` [n_tokens, 3] are M-RoPE's time, height and width. If `both_ways`,
    rows of an image attend to each other."""
    with GGUF.open(path) as gguf:
        w = {
            t.name: dequantize(gguf.data(t.name), t.type, t.shape).astype(np.float64)
            for t in gguf.tensors.values()
        }
        arch = gguf.architecture
        get = lambda key, *default: gguf.get(f"{arch}.{key}", *default)  # noqa: E731
        n_layer, heads, kv_heads = (
            get("block_count"),
            get("attention.head_count"),
            get("attention.head_count_kv"),
        )
        eps, base = get("attention.layer_norm_rms_epsilon"), get("rope.freq_base", 10_000.0)
        sections = get("rope.dimension_sections", [])
        n_used, expert_scale = get("expert_used_count", 0), get("expert_weights_scale", 1.0)
    hd = w["blk.0.attn_q.weight"].shape[0] // heads
    n = len(tokens)
    angle = np.arange(n)[:, None] * base ** (-np.arange(0, hd, 2) / hd)
    if positions is not None:
        angle = positions[:, components(hd // 2, sections)] * base ** (-np.arange(0, hd, 2) / hd)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def rms(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return rms(x) * w[name + ".weight"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        if squares is not None:
            squares[name] = squares.get(name, 0.0) + (x * x).sum(0)
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0.0)

    def rope(x: np.ndarray) -> np.ndarray:
        a, b = (x[..., 0::2], x[..., 1::2]) if arch in ADJACENT_PAIRS else np.split(x, 2, -1)
        turned = a * cos - b * sin, a * sin + b * cos
        return np.stack(turned, -1).reshape(x.shape) if arch in ADJACENT_PAIRS else np.concatenate(turned, -1)

    def swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
        return (x @ gate.T / (1 + np.exp(-x @ gate.T)) * (x @ up.T)) @ down.T

    def experts(x: np.ndarray, p: str, chosen: np.ndarray | None) -> np.ndarray:
        logits = linear(x, p + "ffn_gate_inp")
        stacks = [w[f"{p}ffn_{name}_exps.weight"] for name in ("gate", "up", "down")]
        y = np.zeros_like(x)
        for r in range(len(x)):
            e = np.argsort(-logits[r], kind="stable")[:n_used] if chosen is None else chosen[r]
            weight = np.exp(logits[r, e] - logits[r].max())
            weight *= expert_scale / weight.sum()
            for u, share in zip(e, weight, strict=True):
                y[r] += share * swiglu(x[r], *(stack[u] for stack in stacks))
        return y

    h = w["token_embd.weight"][tokens]
    n_embd = h.shape[1]
    for first, rows in (images or {}).items():
        h[first : first + len(rows)] = rows[:, :n_embd]
    stored: list[tuple[np.ndarray, np.ndarray]] = []
    for il in range(n_layer):
        p = f"blk.{il}."
        if states is not None:
            states.append(h)
        x = norm(h, p + "attn_norm")
        q, k, v = (linear(x, f"{p}attn_{name}").reshape(n, -1, hd) for name in "qkv")
        if f"{p}attn_q_norm.weight" in w:
            q, k = norm(q, p + "attn_q_norm"), norm(k, p + "attn_k_norm")
        q, k = rope(q), rope(k).astype(cache).astype(np.float64)
        v = v.astype(cache).astype(np.float64)
        stored.append((k, v))
        k, v = (a.repeat(heads // kv_heads, 1) for a in stored[owners[il] if owners else il])
        s = q.transpose(1, 0, 2) @ k.transpose(1, 2, 0) / np.sqrt(hd)
        seen = np.tril(np.ones((n, n), bool))
        if windows and windows[il]:
            seen &= ~np.tril(seen, -windows[il])
        for first, rows in (images or {}).items() if both_ways else ():
            seen[first : first + len(rows), first : first + len(rows)] = True
        s = np.where(seen, s, -np.inf)
        p_ = np.exp(s - s.max(-1, keepdims=True))
        a = (p_ @ v.transpose(1, 0, 2) / p_.sum(-1, keepdims=True)).transpose(1, 0, 2).reshape(n, -1)
        h = h + linear(a, p + "attn_output")
        x = norm(h, p + "ffn_norm")
        if n_used:
            h = h + experts(x, p, None if ids is None else ids[il])
        else:
            gate, up = linear(x, p + "ffn_gate"), linear(x, p + "ffn_up")
            h = h + linear(gate / (1 + np.exp(-gate)) * up, p + "ffn_down")
        h = h + (control or {}).get(il, 0.0)
        for first, rows in (images or {}).items():
            more = rows[:, (1 + il) * n_embd : (2 + il) * n_embd]
            h[first : first + len(rows), : more.shape[1]] += more
    if states is not None:
        states.append(h)
    return linear(norm(h, "output_norm"), "output" if "output.weight" in w else "token_embd")
