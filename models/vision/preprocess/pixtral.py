"""Pixtral and Mistral Small 3: shrunk to a longest side, then stretched to complete merged patches.

The rules are from PixtralImageProcessorPil (transformers). The projector adds the embedding of [IMG_BREAK]
after each row of merged patches but the last. The longest side is shorter if the picture would have more rows
than the limit.
"""

from __future__ import annotations

import math

from vkbackend.models.vision.config import TokenLimits, VisionConfig
from vkbackend.models.vision.preprocess.cut import BICUBIC, Cut, Size


def cut(height: int, width: int, config: VisionConfig, limits: TokenLimits) -> Cut:
    side = config.patch_size * config.merge
    longest = config.image_size
    rows, columns = complete(height, width, longest, side)
    while rows * (columns + 1) - 1 > config.most_tokens(limits) and longest > side:
        longest -= side
        rows, columns = complete(height, width, longest, side)
    size = rows * side, columns * side
    return Cut(BICUBIC, (size,), (0, "[IMG_END]"), config.patch_size, config.merge, n_marks=rows - 1)


def complete(height: int, width: int, longest: int, side: int) -> Size:
    """Return the number of rows and of columns of patches with `side` pixels per side. The picture is not
    enlarged first."""
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    return (height - 1) // side + 1, (width - 1) // side + 1
