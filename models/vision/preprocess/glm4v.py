"""GLM-4.1V and later: one picture of any size in multiples of merged patches, as in qwen_vl.py. A picture
smaller than one row is enlarged first. The rules are from Glm4vImageProcessorPil (transformers), with other
limits.
"""

from __future__ import annotations

from vkbackend.models.vision.config import TokenLimits, VisionConfig
from vkbackend.models.vision.preprocess.cut import BICUBIC, Cut
from vkbackend.models.vision.preprocess.qwen_vl import token_range
from vkbackend.models.vision.preprocess.rules import within_limits

LAYOUT = "<|begin_of_image|>", 0, "<|end_of_image|>"


def cut(height: int, width: int, config: VisionConfig, limits: TokenLimits) -> Cut:
    side = config.patch_size * config.merge
    if min(height, width) < side:
        factor = max(side / height, side / width)
        height, width = int(height * factor), int(width * factor)
    least, most = token_range(config, limits, side**2)
    size = within_limits(height, width, side, least * side**2, most * side**2)
    return Cut(BICUBIC, (size,), LAYOUT, config.patch_size, config.merge)
