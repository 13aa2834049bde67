"""Turns pixels into the encoder's patches with the rules of a projector's family."""

from __future__ import annotations

import hashlib
from importlib import import_module

import numpy as np

from vkbackend.errors import InvalidArgument, UnsupportedModel
from vkbackend.models.vision.config import TokenLimits, VisionConfig
from vkbackend.models.vision.patches import cut_patches
from vkbackend.models.vision.picture import Picture, Tile
from vkbackend.models.vision.preprocess.cut import Cut, normalized
from vkbackend.models.vision.rows import KEY_NBYTES

VERSION = 1  # The version of the rules, a part of a picture's key.
FAMILIES = {  # projector type -> module
    "idefics3": "idefics3",
    "qwen3vl_merger": "qwen_vl",
    "qwen2.5vl_merger": "qwen_vl",
    "qwen2vl_merger": "qwen_vl",
    "gemma3": "gemma3",
    "pixtral": "pixtral",
    "gemma4v": "gemma4",
    "gemma4uv": "gemma4",
    "lfm2": "lfm2",
    "internvl": "internvl",
    "mlp": "llava",
    "resampler": "minicpmv",
    "llama4": "llama4",
    "glm4v": "glm4v",
    "kimivl": "kimi",
    "kimik25": "kimi",
}
MAX_ASPECT = 200  # longer side / shorter side, as in transformers


def cut_of(height: int, width: int, config: VisionConfig, limits: TokenLimits) -> Cut:
    """Return how a picture of this size is cut. Raises InvalidArgument and UnsupportedModel."""
    if min(height, width) < 1 or max(height, width) > MAX_ASPECT * min(height, width):
        raise InvalidArgument(
            f"the picture has {width} x {height} pixels; the longer side may be at most {MAX_ASPECT} times "
            "the shorter"
        )
    if config.projector not in FAMILIES:
        raise UnsupportedModel(f"{config.path}: no preprocessing for projectors of type {config.projector!r}")
    family = import_module(f"vkbackend.models.vision.preprocess.{FAMILIES[config.projector]}")
    cut: Cut = family.cut(height, width, config, limits)
    return cut


def count(height: int, width: int, config: VisionConfig, limits: TokenLimits) -> int:
    """Return how many rows a picture of this size has in the text model, all tiles together."""
    return cut_of(height, width, config, limits).n_rows


def counts(height: int, width: int, config: VisionConfig, limits: TokenLimits) -> tuple[int, ...]:
    """Return how many rows each tile of a picture of this size has."""
    return cut_of(height, width, config, limits).tile_rows


def prepare(pixels: np.ndarray, config: VisionConfig, limits: TokenLimits) -> Picture:
    """Return the patches of pixels u8 [height, width, 3]. Raises InvalidArgument and UnsupportedModel."""
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise InvalidArgument(
            f"pixels of type {pixels.dtype} and shape {pixels.shape}; u8 [height, width, 3] is expected"
        )
    cut = cut_of(pixels.shape[0], pixels.shape[1], config, limits)
    mean, std = config.image_mean, config.image_std
    if config.projector == "gemma4v":  # The model itself maps pixels x in 0..1 to 2 x - 1.
        mean = std = (0.5, 0.5, 0.5)
    tiles = tuple(
        Tile(
            cut_patches(normalized(tile, mean, std), cut.patch, cut.merge),
            (tile.shape[0] // cut.patch, tile.shape[1] // cut.patch),
        )
        for tile in cut.tiles(pixels)
    )
    return Picture(key_of(pixels, config, limits), tiles, cut.layout)


def key_of(pixels: np.ndarray, config: VisionConfig, limits: TokenLimits) -> bytes:
    """Return a hash of the pixels, the projector's file and the parameters of the rules."""
    parameters = VERSION, pixels.shape, config.projector, limits.min_tokens, limits.max_tokens
    digest = hashlib.sha256(repr(parameters).encode() + config.identity)
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()[:KEY_NBYTES]
