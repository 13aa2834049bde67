"""Trains `stories-narrow-eagle3.npz`, an EAGLE-3 head for stories-narrow-F16.

    PYTHONPATH=tests/support python tests/data/make_eagle3.py [--steps N]

Needs torch. The model does not change, and the head's output matrix consists of rows of the model's. The head
learns the model's probabilities of the tokens that are frequent in stories of the grammar. In the last two
thirds of the training, the head also learns to continue from its own state (training-time test, Li et al.
2025, arXiv:2503.01840, section 3.2).
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from head_training import CONFIG, DATA, N_ROW, begin, n_steps, train

from vkbackend.tools.demo.transformer import Weights, block, rotations
from vkbackend.tools.demo.vocabulary import Vocabulary
from vkbackend.tools.train_demo import token_rows

LAYERS = (1, 3, 4)  # Their inputs are the states.
N_DRAFT, N_FF = 320, 128


def head_weights() -> Weights:
    d, kv, wide = CONFIG.n_embd, CONFIG.n_head_kv * CONFIG.head_dim, 2 * CONFIG.n_embd
    shapes = {
        "fc": (d, 3 * d),
        "blk.0.attn_q": (d, wide),
        "blk.0.attn_k": (kv, wide),
        "blk.0.attn_v": (kv, wide),
    }
    shapes |= {"blk.0.attn_output": (d, d), "blk.0.ffn_gate": (N_FF, d), "blk.0.ffn_up": (N_FF, d)}
    shapes |= {"blk.0.ffn_down": (d, N_FF)}
    head = {f"{name}.weight": torch.randn(n, m) * m**-0.5 for name, (n, m) in shapes.items()}
    for name in ("blk.0.attn_norm", "blk.0.attn_norm_2", "blk.0.ffn_norm", "output_norm"):
        head[f"{name}.weight"] = torch.ones(d)
    return {name: value.requires_grad_() for name, value in head.items()}


@torch.no_grad()
def states_of(w: Weights, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the head's three states [batch, n, 3 * n_embd], and the model's logits."""
    h, cos_sin = F.embedding(tokens, w["token_embd.weight"]), rotations(CONFIG, tokens.shape[1])
    states = []
    for il in range(CONFIG.n_layer):
        states.append(h)
        h = block(h, w, CONFIG, il, cos_sin)
    states.append(h)
    normed = F.rms_norm(h, (CONFIG.n_embd,), w["output_norm.weight"], CONFIG.eps)
    return torch.cat([states[il] for il in LAYERS], -1), normed @ w["token_embd.weight"].T


def run_head(head: Weights, e: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Return the head's states for embeddings [batch, n, n_embd] after the rows of g."""
    (batch, n, d), (cos, sin) = e.shape, rotations(CONFIG, e.shape[1])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (d,), head[f"blk.0.{name}.weight"], CONFIG.eps)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ head[f"blk.0.{name}.weight"].T

    def heads(x: torch.Tensor, turned: bool) -> torch.Tensor:
        x = x.view(batch, n, -1, CONFIG.head_dim).transpose(1, 2)
        if turned:
            a, b = x[..., 0::2], x[..., 1::2]
            x = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        return x.repeat_interleave(CONFIG.n_head // x.shape[1], 1)

    x = torch.cat([norm(e, "attn_norm"), norm(g, "attn_norm_2")], -1)
    q, k, v = (heads(linear(x, f"attn_{name}"), name != "v") for name in "qkv")
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, n, d)
    h = g + linear(mixed, "attn_output")
    y = norm(h, "ffn_norm")
    return h + linear(F.silu(linear(y, "ffn_gate")) * linear(y, "ffn_up"), "ffn_down")


def frequent(vocabulary: Vocabulary) -> np.ndarray:
    counts = Counter(token for row in islice(token_rows(vocabulary, 5, N_ROW), 300) for token in row)
    return np.sort([token for token, _ in counts.most_common(N_DRAFT)])


def main() -> None:
    steps = n_steps(1200)
    vocabulary, w = begin()
    ids = frequent(vocabulary)
    output, head = w["token_embd.weight"][torch.from_numpy(ids)], head_weights()

    def losses_of(tokens: torch.Tensor, n_chained: int) -> tuple[list[torch.Tensor], list[float]]:
        states, logits = states_of(w, tokens)
        e, before = F.embedding(tokens, w["token_embd.weight"]), states @ head["fc.weight"].T
        losses, right = [], []
        for n in range(1, 1 + n_chained):
            before = run_head(head, e[:, n:], before[:, :-1])
            normed = F.rms_norm(before, (CONFIG.n_embd,), head["output_norm.weight"], CONFIG.eps)
            guessed, wanted = normed @ output.T, logits[:, n:]
            wanted_ids = wanted[..., ids].softmax(-1)
            losses.append(F.kl_div(guessed.log_softmax(-1), wanted_ids, reduction="none").sum(-1).mean())
            best = torch.from_numpy(ids)[guessed.argmax(-1)]
            right.append(float((best == wanted.argmax(-1))[:, 8:].float().mean()))
        return losses, right

    arrays = train(head, vocabulary, losses_of, steps)
    np.savez_compressed(DATA / "stories-narrow-eagle3.npz", **arrays, d2t=ids.astype(np.int64))


if __name__ == "__main__":
    main()
