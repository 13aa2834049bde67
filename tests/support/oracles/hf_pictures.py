"""Uses the image processors of Hugging Face `transformers` as an oracle. The processors of LFM2-VL, Llama 4
and Kimi resize with torch, all others with Pillow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch
from picture_goldens import STRETCHED, WITH_MARGIN
from PIL import Image
from transformers import image_processing_backends
from transformers.image_utils import SizeDict

from vkbackend.models.vision.config import TokenLimits, VisionConfig

MODULES = {
    "idefics3": "idefics3:Idefics3",
    "qwen3vl_merger": "qwen2_vl:Qwen2VL",
    "qwen2.5vl_merger": "qwen2_vl:Qwen2VL",
    "gemma3": "gemma3:Gemma3",
    "pixtral": "pixtral:Pixtral",
    "gemma4v": "gemma4:Gemma4",
    "gemma4uv": "gemma4:Gemma4",
    "internvl": "got_ocr2:GotOcr2",
    "mlp": "llava:Llava",
    "resampler": "minicpmv4_6:MiniCPMV4_6",
    "glm4v": "glm4v:Glm4v",
}


def processor(config: VisionConfig, min_tokens: int = 0, max_tokens: int = 0) -> Any:
    c = config
    side = c.patch_size * max(1, c.merge)
    common: dict[str, Any] = {"image_mean": list(c.image_mean), "image_std": list(c.image_std)}
    if c.projector == "lfm2":
        module = import_module("transformers.models.lfm2_vl.image_processing_lfm2_vl")
        return module.Lfm2VlImageProcessor(encoder_patch_size=c.patch_size, **common)
    if c.projector == "llama4":
        module = import_module("transformers.models.llama4.image_processing_llama4")
        made = module.Llama4ImageProcessor(size={"height": c.image_size, "width": c.image_size}, **common)
        # The processor's own method rounds pixels to BF16.
        made.rescale_and_normalize = partial(module.TorchvisionBackend.rescale_and_normalize, made)
        return made
    if c.projector in WITH_MARGIN:
        module = import_module("transformers.models.kimi_k25.image_processing_kimi_k25")
        return module.Kimi_K25ImageProcessor(max_patches=max_tokens * c.merge**2, **common)
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
        "mlp": {
            "size": {"shortest_edge": c.image_size},
            "crop_size": {"height": c.image_size, "width": c.image_size},
            "do_pad": True,
        },
        "resampler": {"patch_size": c.patch_size},
    }.get(c.projector, {})
    if c.projector in STRETCHED:
        area = n_frames(c) * side**2
        options = {
            "patch_size": c.patch_size,
            "merge_size": c.merge,
            "size": {"shortest_edge": min_tokens * area, "longest_edge": max_tokens * area},
        }
    name, _, prefix = MODULES[c.projector].partition(":")
    module = import_module(f"transformers.models.{name}.image_processing_pil_{name}")
    return getattr(module, f"{prefix}ImageProcessorPil")(**common, **options)


def n_frames(config: VisionConfig) -> int:
    """Return the factor by which the limits count each pixel. GLM's limits count a picture as a video of two
    frames."""
    return 2 if config.projector == "glm4v" else 1


def tiles(config: VisionConfig, pixels: np.ndarray, **limits: int) -> list[np.ndarray]:
    """Return the normalized pixels of each tile, f32 [3, height, width]."""
    c, p = config, config.patch_size
    image = Image.fromarray(pixels)
    made = processor(c, **limits)
    if c.projector == "idefics3":
        return list(made(images=[[image]])["pixel_values"][0])
    if c.projector == "llama4":
        return list(made(images=[image], return_tensors="pt")["pixel_values"].numpy())
    if c.projector in WITH_MARGIN:
        out = made(images=[image], return_tensors="pt")
        _, rows, columns = out["image_grid_thw"].reshape(-1).tolist()
        values = out["pixel_values"].numpy().reshape(rows, columns, 3, p, p)
        return [values.transpose(2, 0, 3, 1, 4).reshape(3, rows * p, columns * p)]
    if c.projector in STRETCHED:
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
    if c.projector == "resampler":
        # Version 4.6 merges 4 x 4 patches, and earlier versions merge no patches.
        best = made.find_best_resize

        def unmerged(
            image_size: Any, scale_resolution: int, patch_size: int, *given: Any, **how: Any
        ) -> tuple[int, ...]:
            return tuple(map(int, best(image_size, scale_resolution, patch_size / 4, *given, **how)))

        made.find_best_resize = unmerged
        out = made(images=[image])
        ends = np.cumsum([rows * columns for rows, columns in out["target_sizes"]]) * p
        whole, *parts = np.split(out["pixel_values"][0], ends[:-1], axis=2)
        result = []
        sizes = [*out["target_sizes"][1:], out["target_sizes"][0]]
        for values, (rows, columns) in zip([*parts, whole], sizes, strict=True):
            cut = values.reshape(3, p, rows, columns, p).transpose(0, 2, 1, 3, 4)
            result.append(cut.reshape(3, rows * p, columns * p))
        return result
    if c.projector == "lfm2":
        out = made(images=[[image]])
        result = []
        for values, (rows, columns) in zip(out["pixel_values"], out["spatial_shapes"].tolist(), strict=True):
            patches = values[: rows * columns].numpy().reshape(rows, columns, p, p, 3)
            result.append(patches.transpose(4, 0, 2, 1, 3).reshape(3, rows * p, columns * p))
        return result
    return list(made(images=[image])["pixel_values"])


def tile_sizes(config: VisionConfig, height: int, width: int, **limits: int) -> list[tuple[int, int]]:
    """Return the height and width of each tile of a picture. Nothing is resized."""
    c, side, made = config, config.patch_size * config.merge, processor(config, **limits)
    module = import_module(type(made).__module__)
    if c.projector in STRETCHED:
        area, names = n_frames(c) * side**2, ("min_pixels", "max_pixels")
        bounds = dict(zip(names, (limits["min_tokens"] * area, limits["max_tokens"] * area), strict=True))
        of_video = {"num_frames": 2} if c.projector == "glm4v" else {}
        return [module.smart_resize(height=height, width=width, factor=side, **bounds, **of_video)]
    if c.projector in WITH_MARGIN:
        most = config.most_tokens(TokenLimits()) * c.merge**2
        return [module.navit_resize(height, width, c.patch_size, c.merge, most, 512)[1]]
    if c.projector == "llama4":
        sizes = torch.tensor(module.find_supported_resolutions(16, made.size))
        rows, columns = (module.get_best_fit((height, width), sizes) // c.image_size).tolist()
        return [(c.image_size, c.image_size)] * (rows * columns + (rows * columns > 1))
    if c.projector.startswith("gemma4"):
        most = made.max_soft_tokens * c.merge**2
        return [module.get_aspect_ratio_preserving_size(height, width, c.patch_size, most, c.merge)]
    blank = np.broadcast_to(np.uint8(0), (3, height, width))
    if c.projector == "pixtral":
        longest = c.image_size, c.image_size
        return [module.get_resize_output_image_size(blank, longest, (side, side))]
    if c.projector == "lfm2":
        options = {"encoder_patch_size": c.patch_size, "downsample_factor": c.merge, "max_image_tokens": 256}
        wide, high = made.smart_resize(height, width, min_image_tokens=64, **options)
        if not made._is_image_too_large(height, width, max_pixels_tolerance=2.0, **options):
            return [(high, wide)]
        columns, rows, *_ = made._get_grid_layout(height, width, 2, 10, 512)
        return [(512, 512)] * (rows * columns) + [(high, wide)]
    with unresized():
        if c.projector == "idefics3":
            size = SizeDict(longest_edge=c.preproc_size)
            whole = made.resize_for_vision_encoder(made.resize(blank, size), c.image_size)
            frames, *_ = made.split_images(whole, {"longest_edge": c.image_size})
        else:
            size = SizeDict(height=c.image_size, width=c.image_size)
            frames = made.crop_image_to_patches(blank, c.min_tiles, c.max_tiles, patch_size=size)
    return [frame.shape[1:] for frame in frames]


@contextmanager
def unresized() -> Iterator[None]:
    """Let processors return blank pictures of the right size."""
    real = image_processing_backends.np_resize
    image_processing_backends.np_resize = lambda image, size, **_: np.broadcast_to(np.uint8(0), (3, *size))
    try:
        yield
    finally:
        image_processing_backends.np_resize = real
