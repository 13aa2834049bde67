"""Gemma 3: the picture is stretched to a square. The rules are from Gemma3ImageProcessorPil (transformers),
without pan and scan, which is off by default.
"""

from __future__ import annotations

from vkbackend.models.vision.config import TokenLimits, VisionConfig
from vkbackend.models.vision.preprocess.cut import BILINEAR, Cut

LAYOUT = "\n\n<start_of_image>", 0, "<end_of_image>\n\n"


def cut(height: int, width: int, config: VisionConfig, limits: TokenLimits) -> Cut:
    size = config.image_size, config.image_size
    return Cut(BILINEAR, (size,), LAYOUT, config.patch_size, config.merge)
