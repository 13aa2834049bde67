"""Kimi-VL and Kimi K2.5: the picture is shrunk to a number of patches, and never enlarged. A black margin at
the right and the bottom completes the merged patches.

The rules are from Kimi_K25ImageProcessor (transformers), with two differences. Pillow resizes instead of
torch, so pixels may differ by 2. If the margin would exceed the limit of rows, the picture shrinks more.
"""

from __future__ import annotations

import math

from vkbackend.models.vision.config import TokenLimits, VisionConfig
from vkbackend.models.vision.preprocess.cut import BICUBIC, Cut, Size

MAX_SIDE = 512  # patches
BEGIN = {"kimivl": "<|media_start|>", "kimik25": "<|media_begin|>"}


def cut(height: int, width: int, config: VisionConfig, limits: TokenLimits) -> Cut:
    patch, merge, most = config.patch_size, config.merge, config.most_tokens(limits)
    n, side = most * merge**2, patch * merge
    size = shrunk(height, width, patch, n)
    while math.prod(rows := [-(-length // side) for length in size]) > most and n > 1:
        n -= 1
        size = shrunk(height, width, patch, n)
    layout = f"{BEGIN[config.projector]}image<|media_content|>", 0, "<|media_end|>"
    return Cut(BICUBIC, (size,), layout, patch, merge, canvas=(rows[0] * side, rows[1] * side))


def shrunk(height: int, width: int, patch: int, n: int) -> Size:
    """Return the size of a picture with about n patches, or the original size if that is smaller."""
    count = max(1, height // patch) * max(1, width // patch)
    factor = min(1.0, math.sqrt(n / count), MAX_SIDE * patch / height, MAX_SIDE * patch / width)
    return max(1, int(height * factor)), max(1, int(width * factor))
