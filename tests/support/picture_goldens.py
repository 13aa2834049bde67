"""Pictures of random sizes, and samples of their preprocessed pixels, for `golden/pictures.npz`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from pictures import blocks

from vkbackend.models.vision.config import TokenLimits, VisionConfig
from vkbackend.models.vision.picture import Tile

N_SAMPLES = 16  # of each tile
# resized to multiples of merged patches, within limits
STRETCHED = "qwen3vl_merger", "qwen2.5vl_merger", "glm4v"
# The reference processors may exceed the limit by a margin; vkbackend shrinks the picture.
WITH_MARGIN = "kimivl", "kimik25"
LIMITS = dict.fromkeys(STRETCHED, TokenLimits(8, 100)) | dict.fromkeys(WITH_MARGIN, TokenLimits(None, 100))
BY_TORCH = "lfm2", "llama4", *WITH_MARGIN  # The reference processors resize these with torch.
PUBLISHED = "idefics3", *STRETCHED, "pixtral", "gemma4v", "lfm2", "internvl", "llama4", "kimivl"
MIN_TOKENS, MAX_TOKENS = 4, 4096  # limits for pictures of Qwen and GLM


def large_sizes() -> list[tuple[int, int]]:
    """Return heights and widths of 500 pictures, from 30 to 4,000 pixels."""
    sides = np.exp(np.random.default_rng(17).uniform(np.log(30), np.log(4000), (500, 2))).astype(int)
    return [(int(h), int(w)) for h, w in sides]


def limits_of(projector: str) -> TokenLimits:
    return LIMITS.get(projector, TokenLimits())


def random_size(projector: str, number: int) -> tuple[int, int]:
    """Return height and width. LFM2-VL cuts pictures of more than 131,072 pixels."""
    rng = np.random.default_rng(1000 + number)
    while True:
        sides = np.exp(rng.uniform(np.log(8), np.log(900 if projector == "lfm2" else 400), 2)).astype(int)
        if sides.max() <= 100 * sides.min():
            return int(sides[0]), int(sides[1])


def pixels_of(projector: str, number: int) -> np.ndarray:
    return blocks(*random_size(projector, number), seed=number)


def in_raster_order(tile: Tile, config: VisionConfig) -> np.ndarray:
    """Return the normalized pixels of a tile, f32 [3, height, width]."""
    patch = math.isqrt(tile.patches.shape[1] // 3)
    (rows, columns), m = tile.grid, config.merge if patch == config.patch_size else 1
    values = tile.patches.reshape(rows // m, columns // m, m, m, 3, patch, patch)
    return values.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * patch, columns * patch)


def levels(tile: np.ndarray, config: VisionConfig) -> np.ndarray:
    """Convert normalized pixels f32 [3, height, width] of a tile to levels from 0 to 255."""
    if config.projector == "gemma4v":
        return (tile + 1) * 127.5
    mean, std = (np.array(x)[:, None, None] for x in (config.image_mean, config.image_std))
    return (tile * std + mean) * 255


def samples(tiles: Sequence[np.ndarray], config: VisionConfig, number: int) -> np.ndarray:
    """Return f64 [n_tiles, N_SAMPLES]: levels of random pixels."""
    rng = np.random.default_rng(number)
    return np.stack([levels(t, config).reshape(-1)[rng.integers(0, t.size, N_SAMPLES)] for t in tiles])
