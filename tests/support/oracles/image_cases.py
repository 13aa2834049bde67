"""Prompts with two images of random rows for text models, shared by transformers and the tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from oracles.fixture import N_VOCAB, Fixture
from oracles.fixtures import build

GRIDS = (3, 4), (5, 4)  # Height and width; 20 rows exceed the windows of the Gemma models.
N_TEXT = 20, 3, 5  # tokens before, between and after the images
BOTH_WAYS = "gemma3", "gemma4"
DEEPSTACK = {"qwen3vl": 2}
NAMES = "qwen2vl", "qwen3vl", "gemma3", "gemma4", "gemma4+shared"


@dataclass(frozen=True)
class Case:
    """`tokens` has 0 in the rows of images. `images` maps the first row to float32 [n, n_embd * tables]."""

    fixture: Fixture
    tokens: list[int]
    images: dict[int, np.ndarray]

    @property
    def is_image(self) -> np.ndarray:
        return np.array([any(at <= i < at + len(v) for at, v in self.images.items()) for i in self.positions])

    @property
    def positions(self) -> range:
        return range(len(self.tokens))


def case(name: str) -> Case:
    fixture = build(name)
    n_deep = DEEPSTACK.get(name, 0)
    if n_deep:
        fixture.keys["n_deepstack_layers"] = n_deep
    rng = np.random.default_rng(34)
    width = fixture.keys["embedding_length"] * (1 + n_deep)
    tokens: list[int] = []
    images: dict[int, np.ndarray] = {}
    for n, grid in zip(N_TEXT, (*GRIDS, None), strict=True):
        tokens += rng.integers(1, N_VOCAB, n).tolist()
        if grid:
            images[len(tokens)] = rng.normal(0, 1, (grid[0] * grid[1], width)).astype(np.float32)
            tokens += [0] * (grid[0] * grid[1])
    return Case(fixture, tokens, images)
