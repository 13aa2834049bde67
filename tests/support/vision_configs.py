"""Hyper-parameters of projectors, without files."""

from __future__ import annotations

from typing import Any

from vkbackend.models.vision.config import VisionConfig

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)
REST: dict[str, Any] = {
    "n_embd": 64,
    "n_ff": 128,
    "n_layer": 1,
    "n_head": 4,
    "eps": 1e-6,
    "projection_dim": 64,
    "activation": "gelu",
    "n_wa_pattern": 0,
    "full_layers": (),
    "deepstack": (),
    "identity": bytes(32),
    "path": "mmproj.gguf",
    "min_pixels": 0,
    "max_pixels": 0,
    "preproc_size": 0,
    "min_tiles": 0,
    "max_tiles": 0,
    "tile_sizes": (),
    "feature_layers": (),
    "n_queries": 0,
    "minicpmv_version": 3,
    "merge": 1,
    "image_mean": HALF,
    "image_std": HALF,
}
SMALL: dict[str, dict[str, Any]] = {  # Tiles small enough for tests.
    "idefics3": {"image_size": 64, "patch_size": 16, "merge": 2, "preproc_size": 256},
    "qwen3vl_merger": {"image_size": 768, "patch_size": 16, "merge": 2},
    "qwen2.5vl_merger": {
        "image_size": 560,
        "patch_size": 14,
        "merge": 2,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    },
    "gemma3": {"image_size": 112, "patch_size": 14, "merge": 4},
    "pixtral": {
        "image_size": 224,
        "patch_size": 14,
        "merge": 2,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    },
    "gemma4v": {
        "image_size": 224,
        "patch_size": 16,
        "merge": 3,
        "image_mean": (0, 0, 0),
        "image_std": (1, 1, 1),
    },
    "gemma4uv": {
        "image_size": 224,
        "patch_size": 16,
        "merge": 3,
        "image_mean": (0, 0, 0),
        "image_std": (1, 1, 1),
    },
    "lfm2": {"image_size": 256, "patch_size": 16, "merge": 2},
    "internvl": {
        "image_size": 56,
        "patch_size": 14,
        "merge": 2,
        "image_mean": IMAGENET_MEAN,
        "image_std": IMAGENET_STD,
        "min_tiles": 1,
        "max_tiles": 12,
    },
    "mlp": {"image_size": 112, "patch_size": 14, "image_mean": CLIP_MEAN, "image_std": CLIP_STD},
    "resampler": {"image_size": 448, "patch_size": 14, "n_queries": 64},
    "llama4": {"image_size": 56, "patch_size": 14, "merge": 2},
    "kimivl": {"image_size": 112, "patch_size": 14, "merge": 2},
    "kimik25": {"image_size": 112, "patch_size": 14, "merge": 2},
    "glm4v": {
        "image_size": 336,
        "patch_size": 14,
        "merge": 2,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
    },
}
REAL: dict[str, dict[str, Any]] = {  # As in published models. Models that SMALL covers are omitted.
    "idefics3": {"image_size": 512, "patch_size": 16, "merge": 4, "preproc_size": 2048},
    "gemma3": {"image_size": 896},
    "pixtral": {"image_size": 1540},
    "internvl": {"image_size": 448},
    "llama4": {"image_size": 336},
}


def vision_config(projector: str, /, real: bool = False, **changed: Any) -> VisionConfig:
    sizes = SMALL[projector] | (REAL.get(projector, {}) if real else {})
    return VisionConfig(**(REST | {"projector": projector} | sizes | changed))
