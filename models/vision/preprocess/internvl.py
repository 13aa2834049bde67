"""InternVL: up to 12 square tiles in a grid of nearly the picture's aspect ratio, then the complete picture.

The rules are from GotOcr2ImageProcessorPil (transformers), with `crop_to_patches`.
"""

from __future__ import annotations

from vkbackend.models.vision.config import TokenLimits, VisionConfig
from vkbackend.models.vision.preprocess.cut import BICUBIC, Cut, Overview
from vkbackend.models.vision.preprocess.rules import nearest_grid

MIN_TILES, MAX_TILES = 1, 12


def cut(height: int, width: int, config: VisionConfig, limits: TokenLimits) -> Cut:
    tile = config.image_size
    rows, columns = nearest_grid(
        height, width, tile, config.min_tiles or MIN_TILES, config.max_tiles or MAX_TILES
    )
    n = rows * columns
    overview = Overview((tile, tile), from_original=True) if n > 1 else None
    layout = "<img>", *range(n + (n > 1)), "</img>"
    size, merge = (rows * tile, columns * tile), config.merge
    return Cut(BICUBIC, (size,), layout, config.patch_size, merge, (rows, columns), overview)
