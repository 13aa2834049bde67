"""Reads a projector's hyper-parameters from its file: GGUF with the architecture `clip`, as llama.cpp's
converter writes it (mmproj). Keys are in llama.cpp's clip-impl.h.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.models.architectures.reading import MAX_HEAD_DIM, MAX_LAYERS, read_count, read_float
from vkbackend.models.gguf.fingerprint import fingerprint
from vkbackend.models.gguf.reader import GGUF

ARCHITECTURE = "clip"
# The side, in patches, of the square that becomes a row, if the file does not state it.
MERGES = {"qwen2vl_merger": 2, "qwen2.5vl_merger": 2, "qwen3vl_merger": 2, "gemma3": 4, "gemma4v": 3}
MERGES |= {"gemma4uv": 3, "lfm2": 2, "internvl": 2, "glm4v": 2, "kimivl": 2, "kimik25": 2}
# Old files state CLIP's own projection_dim instead of the text model's, so these tensors give the width.
LAST_WEIGHTS = {"mlp": "mm.2.weight", "resampler": "resampler.proj.weight"}
QUERIES = "resampler.query"
NO_ENCODER = ("gemma4uv",)  # a patch is the complete square that becomes a row
MAX_PATCH = 64  # Maximum side of a patch in pixels.
MAX_SIDE = 16_384  # Maximum side of a picture in pixels.
MAX_TILES = 64  # of a picture
WINDOW = 112  # Side of a window in pixels, in every released Qwen2.5-VL.
MAX_TOKENS = 2048  # Default maximum of a picture's rows, if pictures vary in size; llama.cpp has 4,096.
# Families with another default. In Qwen2.5-VL each window is a run, and a step takes at most MAX_RUNS (128).
# A picture with 1,024 rows has up to 104 windows.
DEFAULT_TOKENS = {"gemma4v": 280, "gemma4uv": 280, "lfm2": 256, "qwen2.5vl_merger": 1024}
DEFAULT_TOKENS |= {"kimivl": 1024}


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """The minimum and the maximum number of rows of a picture, in families whose pictures vary in size. None
    means the family's default."""

    min_tokens: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class VisionConfig:
    projector: str  # clip.projector_type
    n_embd: int  # Width of the encoder.
    n_ff: int
    n_layer: int
    n_head: int
    eps: float
    projection_dim: int  # n_embd of the text model.
    image_size: int  # Side of a square picture or tile in pixels.
    patch_size: int
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    activation: str  # gelu, silu or gelu_quick
    merge: int  # Side in patches of the square that becomes a row: spatial_merge_size or scale factor.
    n_wa_pattern: int  # Every n-th layer attends to the complete picture, others to windows (0: no windows).
    full_layers: tuple[int, ...]  # Layers without windows, if the file lists them.
    deepstack: tuple[int, ...]  # Layers whose output is merged and added in the text model.
    min_pixels: int  # 0: the file does not state it.
    max_pixels: int
    preproc_size: int  # Longest side before cutting tiles (0: not stated).
    min_tiles: int
    max_tiles: int
    tile_sizes: tuple[int, ...]  # Grids of tiles, written as height, width, height, width, ...
    feature_layers: tuple[int, ...]  # Layers that the projector reads, if the file lists them.
    n_queries: int  # Queries of a resampler, which become rows (0: no resampler).
    minicpmv_version: int
    identity: bytes  # SHA-256 of the file's hyper-parameters and of samples of its tensors.
    path: str

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def has_windows(self) -> bool:
        return bool(self.n_wa_pattern or self.full_layers)

    @property
    def patch_side(self) -> int:
        """Return the side, in pixels, of the patches that the encoder reads."""
        return self.patch_size * self.merge if self.projector in NO_ENCODER else self.patch_size

    def most_tokens(self, limits: TokenLimits) -> int:
        """Return the maximum number of rows of a picture or tile: the caller's, or else the family's
        default."""
        return limits.max_tokens or DEFAULT_TOKENS.get(self.projector, MAX_TOKENS)

    @property
    def n_deepstack(self) -> int:
        return len(self.deepstack)

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> VisionConfig:
        """Raises GGUFError, and UnsupportedModel for a file that is no projector of pictures."""
        path, projector = gguf.paths[0], projector_type(gguf)
        if not gguf.boolean("clip.has_vision_encoder", False):
            raise UnsupportedModel(f"{path}: the file has no encoder of pictures (clip.has_vision_encoder)")
        projector, n_embd = projector_type(gguf), read_count(gguf, "vision.embedding_length")
        n_head, n_ff, n_layer = 1, 0, 0
        if projector not in NO_ENCODER:
            n_head = read_count(gguf, "vision.attention.head_count")
            n_ff = read_count(gguf, "vision.feed_forward_length")
            n_layer = read_count(gguf, "vision.block_count", limit=MAX_LAYERS)
            _check_heads(path, n_embd, n_head)
        scale = read_count(gguf, "vision.projector.scale_factor", MERGES.get(projector, 1), 64)
        image_size = read_count(gguf, "vision.image_size", limit=MAX_SIDE)
        min_tiles, max_tiles = (int(gguf.u32(f"clip.vision.preproc_{m}_tiles", 0)) for m in ("min", "max"))
        if max(min_tiles, max_tiles) > MAX_TILES or (max_tiles and min_tiles > max_tiles):
            raise GGUFError(f"{path}: {min_tiles} to {max_tiles} tiles per picture, at most {MAX_TILES}")
        return cls(
            projector=projector,
            n_embd=n_embd,
            n_ff=n_ff,
            n_layer=n_layer,
            n_head=n_head,
            eps=read_float(gguf, "vision.attention.layer_norm_epsilon", 1e-6),
            projection_dim=_projection_dim(gguf, projector),
            image_size=image_size,
            patch_size=read_count(gguf, "vision.patch_size", limit=MAX_PATCH),
            image_mean=_channels(gguf, "clip.vision.image_mean"),
            image_std=_channels(gguf, "clip.vision.image_std"),
            activation=_activation(gguf),
            merge=read_count(gguf, "vision.spatial_merge_size", scale, 64),
            n_wa_pattern=int(gguf.u32("clip.vision.n_wa_pattern", 0)),
            full_layers=_layers(gguf, "clip.vision.wa_layer_indexes"),
            deepstack=tuple(np.flatnonzero(gguf.flags("clip.vision.is_deepstack_layers", [])).tolist()),
            min_pixels=int(gguf.u32("clip.vision.image_min_pixels", 0)),
            max_pixels=int(gguf.u32("clip.vision.image_max_pixels", 0)),
            preproc_size=int(gguf.u32("clip.vision.preproc_image_size", 0)),
            min_tiles=min_tiles,
            max_tiles=max_tiles,
            tile_sizes=_layers(gguf, "clip.vision.image_grid_pinpoints"),
            feature_layers=_layers(gguf, "clip.vision.feature_layer"),
            n_queries=gguf.tensors[QUERIES].shape[0] if QUERIES in gguf.tensors else 0,
            minicpmv_version=int(gguf.u32("clip.minicpmv_version", 2)),
            identity=bytes.fromhex(fingerprint(gguf)),
            path=str(path),
        )


def projector_type(gguf: GGUF) -> str:
    """Return the projector's type. Files with pictures and sound have a key for each. Raises GGUFError, and
    UnsupportedModel for a file that is not a projector."""
    if gguf.architecture != ARCHITECTURE:
        raise UnsupportedModel(
            f"{gguf.paths[0]}: architecture {gguf.architecture!r} is no projector (mmproj); a text model is "
            "given with -m"
        )
    keys = "clip.vision.projector_type", "clip.projector_type"
    for key in keys:
        if name := gguf.string(key, ""):
            return name
    if gguf.boolean("clip.has_llava_projector", False):
        return "mlp"
    raise GGUFError(f"{gguf.paths[0]}: the metadata key {keys[1]!r} is missing, expected a string")


def _projection_dim(gguf: GGUF, projector: str) -> int:
    if (name := LAST_WEIGHTS.get(projector)) is None:
        return read_count(gguf, "vision.projection_dim")
    if name not in gguf.tensors:
        raise GGUFError(f"{gguf.paths[0]}: the tensor {name!r} is missing")
    return gguf.tensors[name].shape[0]


def _check_heads(path: object, n_embd: int, n_head: int) -> None:
    if n_embd % n_head or n_embd // n_head % 8 or n_embd // n_head > MAX_HEAD_DIM:
        raise UnsupportedModel(
            f"{path}: {n_head} heads of an encoder {n_embd} wide; supported are head sizes that are "
            f"multiples of 8 up to {MAX_HEAD_DIM}"
        )


def _activation(gguf: GGUF) -> str:
    if gguf.boolean("clip.use_silu", False):
        return "silu"
    return "gelu" if gguf.boolean("clip.use_gelu", False) else "gelu_quick"


def _channels(gguf: GGUF, key: str) -> tuple[float, float, float]:
    values = [float(x) for x in gguf.floats(key)]
    if len(values) != 3 or not np.isfinite(values).all() or (key.endswith("std") and min(values) <= 0):
        raise GGUFError(f"{gguf.paths[0]}: {key} is {values[:8]}, expected a finite value per channel (3)")
    return values[0], values[1], values[2]


def _layers(gguf: GGUF, key: str) -> tuple[int, ...]:
    return tuple(int(il) for il in gguf.ints(key, []))
