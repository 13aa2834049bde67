"""Gemma 4: the picture gets the largest size that keeps its aspect ratio within a limit of patches.

The rules are from Gemma4ImageProcessorPil (transformers). `gemma4uv` has no encoder, so its patches are the
merged squares.
"""

from __future__ import annotations

import math

from vkbackend.errors import InvalidArgument
from vkbackend.models.vision.config import TokenLimits, VisionConfig
from vkbackend.models.vision.preprocess.cut import BICUBIC, Cut, Size

LAYOUT = "<|image>", 0, "<image|>"


def cut(height: int, width: int, config: VisionConfig, limits: TokenLimits) -> Cut:
    merge = config.merge
    side = config.patch_size * merge
    size = largest(height, width, side, config.most_tokens(limits))
    if config.projector == "gemma4uv":
        return Cut(BICUBIC, (size,), LAYOUT, side, 1)
    return Cut(BICUBIC, (size,), LAYOUT, config.patch_size, merge)


def largest(height: int, width: int, side: int, n: int) -> Size:
    """Return the largest size in multiples of `side` with at most n squares of `side`."""
    factor = math.sqrt(n * side**2 / (height * width))
    rows, columns = math.floor(factor * height / side), math.floor(factor * width / side)
    if not rows and not columns:
        raise InvalidArgument(f"a picture of {width} x {height} pixels does not fit {n} tokens; allow more")
    if not rows:
        rows, columns = 1, min(width // height, n)
    elif not columns:
        rows, columns = min(height // width, n), 1
    return rows * side, columns * side
