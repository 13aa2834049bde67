"""LLaVA 1.5: the picture is centered on a square of the mean color, which is then resized. The rules are from
LLaVA, and the same as in LlavaImageProcessorPil (transformers) with `do_pad`.
"""

from __future__ import annotations

from vkbackend.models.vision.config import TokenLimits, VisionConfig
from vkbackend.models.vision.preprocess.cut import BICUBIC, Cut


def cut(height: int, width: int, config: VisionConfig, limits: TokenLimits) -> Cut:
    size = config.image_size, config.image_size
    mean = tuple(int(255 * value) for value in config.image_mean)
    return Cut(BICUBIC, (size,), (0,), config.patch_size, config.merge, square=mean)
