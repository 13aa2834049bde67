"""Uses the image processors of Hugging Face `transformers` as an oracle. LFM2-VL's resizes with torch, the
others with Pillow."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from PIL import Image

from vkbackend.models.vision.config import VisionConfig

MODULES = {
    "idefics3": "idefics3:Idefics3",
    "qwen3vl_merger": "qwen2_vl:Qwen2VL",
    "qwen2.5vl_merger": "qwen2_vl:Qwen2VL",
    "gemma3": "gemma3:Gemma3",
    "pixtral": "pixtral:Pixtral",
    "gemma4v": "gemma4:Gemma4",
    "gemma4uv": "gemma4:Gemma4",
    "internvl": "got_ocr2:GotOcr2",
}


def processor(config: VisionConfig, min_tokens: int = 0, max_tokens: int = 0) -> Any:
    c = config
    side = c.patch_size * max(1, c.merge)
    common: dict[str, Any] = {"image_mean": list(c.image_mean), "image_std": list(c.image_std)}
    if c.projector == "lfm2":
        module = import_module("transformers.models.lfm2_vl.image_processing_lfm2_vl")
        return module.Lfm2VlImageProcessor(encoder_patch_size=c.patch_size, **common)
    options: dict[str, Any] = {
        "idefics3": {
            "size": {"longest_edge": c.preproc_size},
            "max_image_size": {"longest_edge": c.image_size},
            "do_pad": False,
        },
        "gemma3": {"size": {"height": c.image_size, "width": c.image_size}},
        "pixtral": {
            "size": {"longest_edge": c.image_size},
            "patch_size": {"height": side, "width": side},
            "do_pad": False,
        },
        "internvl": {
            "size": {"height": c.image_size, "width": c.image_size},
            "crop_to_patches": True,
            "min_patches": c.min_tiles,
            "max_patches": c.max_tiles,
        },
    }.get(c.projector, {})
    if c.projector.startswith("qwen"):
        options = {
            "patch_size": c.patch_size,
            "merge_size": c.merge,
            "size": {"shortest_edge": min_tokens * side**2, "longest_edge": max_tokens * side**2},
        }
    name, _, prefix = MODULES[c.projector].partition(":")
    module = import_module(f"transformers.models.{name}.image_processing_pil_{name}")
    return getattr(module, f"{prefix}ImageProcessorPil")(**common, **options)


def tiles(config: VisionConfig, pixels: np.ndarray, **limits: int) -> list[np.ndarray]:
    """Return the normalized pixels of each tile, f32 [3, height, width]."""
    c, p = config, config.patch_size
    image = Image.fromarray(pixels)
    made = processor(c, **limits)
    if c.projector == "idefics3":
        return list(made(images=[[image]])["pixel_values"][0])
    if c.projector.startswith("qwen"):
        out = made(images=[image])
        (_, rows, columns), m = out["image_grid_thw"][0], c.merge
        values = out["pixel_values"].reshape(rows // m, columns // m, m, m, 3, 2, p, p)[:, :, :, :, :, 0]
        return [values.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * p, columns * p)]
    if c.projector.startswith("gemma4"):
        out = made(images=[image])
        at = out["image_position_ids"][0]
        columns, rows = at.max(0) + 1
        values = out["pixel_values"][0][: rows * columns].reshape(rows, columns, p, p, 3)
        values = values.transpose(4, 0, 2, 1, 3).reshape(3, rows * p, columns * p)
        return [2 * (values - np.float32(0.5)) if c.projector == "gemma4v" else values]
    if c.projector == "lfm2":
        out = made(images=[[image]])
        result = []
        for values, (rows, columns) in zip(out["pixel_values"], out["spatial_shapes"].tolist(), strict=True):
            patches = values[: rows * columns].numpy().reshape(rows, columns, p, p, 3)
            result.append(patches.transpose(4, 0, 2, 1, 3).reshape(3, rows * p, columns * p))
        return result
    return list(made(images=[image])["pixel_values"])
