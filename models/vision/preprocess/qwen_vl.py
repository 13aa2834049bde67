"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: one picture of any size in multiples of merged patches.

The rules are from Qwen2VLImageProcessorPil (transformers), with other limits (`token_range`). Pictures of
Qwen2.5-VL also shrink to MAX_RUNS windows, because a step has a table of MAX_RUNS runs. This changes only
pictures above 1,024 rows.
"""

from __future__ import annotations

from vkbackend.models.vision.config import WINDOW, TokenLimits, VisionConfig
from vkbackend.models.vision.preprocess.cut import BICUBIC, Cut
from vkbackend.models.vision.preprocess.rules import within_limits
from vkbackend.step import MAX_RUNS

MIN_TOKENS = 8  # minimum rows of a picture, as in llama.cpp


def cut(height: int, width: int, config: VisionConfig, limits: TokenLimits) -> Cut:
    merge = config.merge
    side = config.patch_size * merge
    least, most = token_range(config, limits, side**2)
    size = within_limits(height, width, side, least * side**2, most * side**2)
    while config.has_windows and n_windows(size) > MAX_RUNS and most > least:
        most -= 1
        size = within_limits(height, width, side, least * side**2, most * side**2)
    return Cut(BICUBIC, (size,), ("<|vision_start|>", 0, "<|vision_end|>"), config.patch_size, merge)


def n_windows(size: tuple[int, int]) -> int:
    return -(-size[0] // WINDOW) * -(-size[1] // WINDOW)


def token_range(config: VisionConfig, limits: TokenLimits, area: int) -> tuple[int, int]:
    """Return the minimum and maximum number of rows: the caller's, else the file's, else the defaults. `area`
    is the number of pixels that become a row. The file's maximum is bounded by the default, because the
    maximum determines the memory of the encoder."""
    most = config.most_tokens(limits)
    if not limits.max_tokens:
        most = min(most, config.max_pixels // area or most)
    least = limits.min_tokens or config.min_pixels // area or MIN_TOKENS
    return min(least, most), most
