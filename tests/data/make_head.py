"""Trains `stories-narrow-head.npz`, a multi-token prediction head for stories-narrow-F16.

    PYTHONPATH=tests/support python tests/data/make_head.py [--steps N]

Needs torch. The model does not change. The head learns the model's own probabilities of the token after the
next one, on stories of the grammar. In the last two thirds of the training, the head also learns to continue
from its own state, as chained drafts do.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from head_training import CONFIG, DATA, begin, n_steps, train

from vkbackend.tools.demo.transformer import Weights, block, rotations, states

PREFIX = f"blk.{CONFIG.n_layer}."


def head_weights(w: Weights) -> Weights:
    """Begin with a copy of the model's last layer, and with the mean of embedding and state."""
    last = f"blk.{CONFIG.n_layer - 1}."
    head = {n.replace(last, PREFIX): v.clone() for n, v in w.items() if n.startswith(last)}
    eye, d = torch.eye(CONFIG.n_embd), CONFIG.n_embd
    noise = 0.02 * torch.randn(d, 2 * d)
    head[f"{PREFIX}nextn.eh_proj.weight"] = torch.cat([0.5 * eye, 0.5 * eye], 1) + noise
    for name in ("enorm", "hnorm", "shared_head_norm"):
        head[f"{PREFIX}nextn.{name}.weight"] = torch.ones(d)
    head[f"{PREFIX}nextn.shared_head_norm.weight"] = w["output_norm.weight"].clone()
    return {name: value.requires_grad_() for name, value in head.items()}


def run_head(head: Weights, w: Weights, tokens: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Return g for tokens [batch, n] after the states h [batch, n, n_embd]."""
    p, d, eps = f"{PREFIX}nextn.", (CONFIG.n_embd,), CONFIG.eps
    e = F.rms_norm(F.embedding(tokens, w["token_embd.weight"]), d, head[f"{p}enorm.weight"], eps)
    x = torch.cat([e, F.rms_norm(h, d, head[f"{p}hnorm.weight"], eps)], -1) @ head[f"{p}eh_proj.weight"].T
    x = block(x, head, CONFIG, CONFIG.n_layer, rotations(CONFIG, tokens.shape[1]))
    return F.rms_norm(x, d, head[f"{p}shared_head_norm.weight"], eps)


def shifted(h: torch.Tensor) -> torch.Tensor:
    return F.pad(h, (0, 0, 1, 0))[:, :-1]


def main() -> None:
    steps = n_steps(1500)
    vocabulary, w = begin()
    head = head_weights(w)

    def losses_of(tokens: torch.Tensor, n_chained: int) -> tuple[list[torch.Tensor], list[float]]:
        with torch.no_grad():
            h = states(w, CONFIG, F.embedding(tokens, w["token_embd.weight"]))
            logits = h @ w["token_embd.weight"].T
        losses, before, right = [], h, []
        for _ in range(n_chained):
            g = run_head(head, w, tokens, shifted(before))
            guessed = g @ w["token_embd.weight"].T
            distance = F.kl_div(guessed.log_softmax(-1), logits.softmax(-1), reduction="none").sum(-1)
            losses.append(distance[:, 1:].mean())
            right.append(float((guessed.argmax(-1) == logits.argmax(-1))[:, 8:].float().mean()))
            before = g
        return losses, right

    arrays = train(head, vocabulary, losses_of, steps)
    np.savez_compressed(DATA / "stories-narrow-head.npz", **arrays)


if __name__ == "__main__":
    main()
