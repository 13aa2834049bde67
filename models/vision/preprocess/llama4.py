"""Llama 4: the picture keeps its aspect ratio on up to 16 square tiles. The complete picture is added.

The rules are from Llama4ImageProcessor (transformers), which resizes with torch and rounds pixels to BF16.
Here, Pillow resizes and nothing is rounded, so pixels may differ by 2.
"""

from __future__ import annotations

import math

import numpy as np

from vkbackend.models.vision.config import TokenLimits, VisionConfig
from vkbackend.models.vision.preprocess.cut import BILINEAR, Cut, Overview, Size

MAX_TILES = 16


def cut(height: int, width: int, config: VisionConfig, limits: TokenLimits) -> Cut:
    tile, patch, merge = config.image_size, config.patch_size, config.merge
    rows, columns = canvas(height, width, tile, config.max_tiles or MAX_TILES)
    size, n = (rows * tile, columns * tile), rows * columns
    resized = inside(height, width, min(max(height, tile), size[0]), min(max(width, tile), size[1]))
    layout: list[str | int] = ["<|image_start|>"]
    for i in range(n if n > 1 else 0):
        layout += [i, "<|tile_x_separator|>" if (i + 1) % columns else "<|tile_y_separator|>"]
    layout += ["<|image|>", n if n > 1 else 0, "<|image_end|>"]
    overview = Overview((tile, tile), from_original=True) if n > 1 else None
    return Cut(BILINEAR, (resized,), joined(layout), patch, merge, (rows, columns), overview, canvas=size)


def canvas(height: int, width: int, tile: int, most: int) -> Size:
    """Return the rows and columns of tiles that enlarge the picture the least, or shrink it the least if all
    shrink it. If factors are equal, the smallest area is taken. Factors are F32, as in the reference."""
    grids = [(rows, columns) for rows in range(1, most + 1) for columns in range(1, most // rows + 1)]
    sides = np.array(grids, np.float32) * np.float32(tile)
    factors = (sides / np.array([height, width], np.float32)).min(axis=1)
    enlarging = factors[factors >= 1]
    best = enlarging.min() if len(enlarging) else factors.max()
    return min((grids[i] for i in np.flatnonzero(factors == best)), key=math.prod)


def inside(height: int, width: int, most_height: int, most_width: int) -> Size:
    """Return the largest size that keeps the picture's aspect ratio and fits into these sides."""
    by_height, by_width = most_height / height, most_width / width
    if by_width < by_height:
        return max(1, min(math.floor(height * by_width), most_height)), most_width
    return most_height, max(1, min(math.floor(width * by_height), most_width))


def joined(layout: list[str | int]) -> tuple[str | int, ...]:
    parts: list[str | int] = []
    for part in layout:
        last = parts[-1] if parts else 0
        if isinstance(part, str) and isinstance(last, str):
            parts[-1] = last + part
        else:
            parts.append(part)
    return tuple(parts)
