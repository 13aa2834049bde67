"""Trains heads that draft for stories-narrow-F16 (make_head.py, make_eagle3.py). The model stays as it is."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from derived import load

from vkbackend.tools.demo.transformer import Config, Weights
from vkbackend.tools.demo.vocabulary import Vocabulary
from vkbackend.tools.train_demo import token_rows

DATA = Path(__file__).resolve().parent
SOURCE = DATA / "stories-narrow-F16.gguf"
CONFIG = Config(n_vocab=512, n_embd=64, n_layer=5, n_head=8, n_head_kv=4, n_ff=172)
N_ROW, BATCH, LR = 192, 6, 4e-3
N_CHAINED = 3  # steps of a chained draft, in the last two thirds of the training

# Maps tokens [batch, n] and the steps of a chained draft to each step's loss and share of right tokens.
Losses = Callable[[torch.Tensor, int], tuple[list[torch.Tensor], list[float]]]


def begin() -> tuple[Vocabulary, Weights]:
    """Seed torch, and return the model's vocabulary and weights."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    fields = gguf.GGUFReader(SOURCE).fields
    vocabulary = Vocabulary(*(fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "scores")))
    return vocabulary, {name: torch.from_numpy(values) for name, values in load(SOURCE).tensors.items()}


def n_steps(default: int) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=default)
    steps: int = parser.parse_args().steps
    return steps


def train(head: Weights, vocabulary: Vocabulary, losses_of: Losses, steps: int) -> dict[str, np.ndarray]:
    """Return the trained head in F16."""
    optimizer = torch.optim.Adam(head.values(), lr=LR, betas=(0.9, 0.98))
    rows = token_rows(vocabulary, 77, N_ROW)
    for step in range(steps):
        falling = 0.02 + 0.49 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = LR * min(1, (step + 1) / 30) * falling
        tokens = torch.tensor([next(rows) for _ in range(BATCH)])
        losses, right = losses_of(tokens, 1 if step < steps // 3 else N_CHAINED)
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(head.values()), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, right {[round(r, 3) for r in right]}", flush=True)
    return {name: value.detach().numpy().astype(np.float16) for name, value in head.items()}
