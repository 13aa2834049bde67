"""Prompts with images, shared by transformers and the tests: two images of random rows, and a picture of
vision.py with the rows of its projector."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from oracles.fixture import N_VOCAB, Fixture
from oracles.fixtures import build
from oracles.vision import GRIDS as PATCHES
from oracles.vision import build as build_projector

GRIDS = (3, 4), (5, 4)  # Height and width; 20 rows exceed the windows of the Gemma models.
N_TEXT = 20, 3, 5  # tokens before, between and after the images
BOTH_WAYS = "gemma3", "gemma4"
DEEPSTACK = {"qwen3vl": 2}
NAMES = "qwen2vl", "qwen3vl", "gemma3", "gemma4", "gemma4+shared"
TEXT_OF = {
    "idefics3": "llama", "qwen3vl": "qwen3vl", "gemma3": "gemma3", "qwen2.5vl": "qwen2vl",
    "qwen2vl": "qwen2vl", "pixtral": "llama", "pixtral+merger": "mistral3", "gemma4v": "gemma4+shared",
    "gemma4uv": "gemma4", "lfm2": "lfm2", "internvl": "qwen3", "internvl+rms": "qwen2", "llava": "llama",
}  # fmt: skip
BREAK = N_VOCAB - 1  # the token [IMG_BREAK] of Pixtral's text models


@dataclass(frozen=True)
class Case:
    """`tokens` has 0 in the rows of images. `images` maps the first row to float32 [n, n_embd * tables], and
    `grids` to the height and width in rows."""

    fixture: Fixture
    tokens: list[int]
    images: dict[int, np.ndarray]
    grids: dict[int, tuple[int, int]]

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
    grids: dict[int, tuple[int, int]] = {}
    for n, grid in zip(N_TEXT, (*GRIDS, None), strict=True):
        tokens += rng.integers(1, N_VOCAB, n).tolist()
        if grid:
            grids[len(tokens)] = grid
            images[len(tokens)] = rng.normal(0, 1, (grid[0] * grid[1], width)).astype(np.float32)
            tokens += [0] * (grid[0] * grid[1])
    return Case(fixture, tokens, images, grids)


def of_picture(name: str, rows: np.ndarray) -> Case:
    """Return a text with the picture of a projector in vision.py, which has the rows `rows`."""
    fixture, projector = build(TEXT_OF[name]), build_projector(name)
    if name == "qwen3vl":
        # As in [24, 20, 20] of 64 pairs, the last pairs are not in turn.
        fixture.keys |= {"n_deepstack_layers": DEEPSTACK[name], "rope.dimension_sections": [4, 2, 2, 0]}
    if "v.token_embd.img_break" in projector.tensors:
        table = fixture["token_embd.weight"].copy()
        table[BREAK] = projector["v.token_embd.img_break"]
        fixture.tensors["token_embd.weight"] = table
    merge = projector.keys.get("vision.spatial_merge_size", 1)
    height, width = (n // merge for n in PATCHES[name])
    rng = np.random.default_rng(35)
    before, after = (rng.integers(1, BREAK, n).tolist() for n in (N_TEXT[0], N_TEXT[-1]))
    tokens, first = [*before, *[0] * len(rows), *after], len(before)
    return Case(fixture, tokens, {first: rows}, {first: (height, width)})
