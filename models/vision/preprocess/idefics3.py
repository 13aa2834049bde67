"""Idefics3 and SmolVLM: the picture is resized to a fixed longest side and cut into tiles. The complete
picture is added as a tile.

The rules are from Idefics3ImageProcessorPil (transformers). A tile has 64 or 81 rows.
"""

from __future__ import annotations

import math

from vkbackend.models.vision.config import TokenLimits, VisionConfig
from vkbackend.models.vision.preprocess.cut import LANCZOS, Cut, Overview, Size
from vkbackend.models.vision.preprocess.rules import tile_texts

MAX_SIDE = 4096  # pixels
GLOBAL = "<fake_token_around_image><global-img>"
TILE = "<fake_token_around_image><row_{row}_col_{column}>"


def cut(height: int, width: int, config: VisionConfig, limits: TokenLimits) -> Cut:
    tile = config.image_size
    whole = longest_side(height, width, config.preproc_size or 4 * tile)
    sizes = whole, in_tiles(*whole, tile)
    rows, columns = sizes[-1][0] // tile, sizes[-1][1] // tile
    size, merge = config.patch_size, config.merge
    if rows * columns == 1:
        return Cut(LANCZOS, sizes, (GLOBAL, 0, "<fake_token_around_image>"), size, merge)
    layout = tile_texts(rows, columns, TILE, "\n")
    layout += [f"\n\n{GLOBAL}", rows * columns, "<fake_token_around_image>"]
    overview = Overview((tile, tile), from_original=False)
    return Cut(LANCZOS, sizes, tuple(layout), size, merge, (rows, columns), overview)


def longest_side(height: int, width: int, side: int) -> Size:
    """Return a size whose longest side is `side`; the other is rounded up to an even number of pixels."""

    def even(n: int) -> int:
        return max(1, n + n % 2)

    ratio = width / height
    size = (even(int(side / ratio)), side) if width >= height else (side, even(int(side * ratio)))
    if side <= MAX_SIDE:
        return size
    ratio = size[1] / size[0]
    if width >= height:
        return max(1, int(MAX_SIDE / ratio)), MAX_SIDE
    return MAX_SIDE, max(1, int(MAX_SIDE * ratio))


def in_tiles(height: int, width: int, tile: int) -> Size:
    """Return the size of complete tiles. The longer side is rounded up first; the shorter side follows from
    it, and is rounded up, too."""

    def up(n: int) -> int:
        return math.ceil(n / tile) * tile

    ratio = width / height
    if width >= height:
        return up(int(up(width) / ratio)), up(width)
    return up(height), up(int(up(height) * ratio))
