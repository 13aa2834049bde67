"""LFM2-VL: one picture of 64 to 256 rows. A larger picture is cut into 2 to 10 tiles, and the complete
picture is added.

The rules are from Lfm2VlImageProcessor (transformers). Pillow resizes instead of torch, so pixels may differ
by 2.
"""

from __future__ import annotations

from vkbackend.models.vision.config import TokenLimits, VisionConfig
from vkbackend.models.vision.preprocess.cut import BILINEAR, Cut, Overview
from vkbackend.models.vision.preprocess.rules import nearest_grid, tile_texts, within_limits

MIN_TOKENS = 64  # minimum rows of a picture that is not cut
TILE = 512  # pixels
MIN_TILES, MAX_TILES = 2, 10
TOLERANCE = 2.0  # A picture is cut if its pixels exceed the limit by more than this factor.


def cut(height: int, width: int, config: VisionConfig, limits: TokenLimits) -> Cut:
    patch, merge = config.patch_size, config.merge
    side = patch * merge
    most = config.most_tokens(limits)
    least = min(limits.min_tokens or MIN_TOKENS, most)
    whole = within_limits(height, width, side, least * side**2, most * side**2, n_min=1)
    begin, end = "<|image_start|>", "<|image_end|>"
    pixels = max(patch, round(height / side) * side) * max(patch, round(width / side) * side)
    if pixels <= most * side**2 * TOLERANCE:
        return Cut(BILINEAR, (whole,), (begin, 0, end), patch, merge)
    rows, columns = nearest_grid(height, width, TILE, MIN_TILES, MAX_TILES)
    layout = tile_texts(rows, columns, "<|img_row_{row}_col_{column}|>")
    layout[0] = f"{begin}{layout[0]}"
    layout += ["<|img_thumbnail|>", rows * columns, end]
    size = rows * TILE, columns * TILE
    overview = Overview(whole, from_original=True)
    return Cut(BILINEAR, (size,), tuple(layout), patch, merge, (rows, columns), overview)
