"""MiniCPM-V: the complete picture, then up to 9 slices of a large picture. Each has about a square's area.

For sides in multiples of a patch, the rules are from MiniCPMV4_6ImageProcessorPil (transformers). A tile has
64 or 96 rows.
"""

from __future__ import annotations

import math
from typing import Any

from vkbackend.models.vision.config import TokenLimits, VisionConfig
from vkbackend.models.vision.preprocess.cut import BICUBIC, Cut, Overview, Size

SIDE = 448  # side, in pixels, of a square with a tile's area
MAX_SLICES = 9
MAX_ASPECT = 200  # longer side / shorter side
NESTED = 2  # clip.minicpmv_version of MiniCPM-V 2.5, which marks slices like images


def cut(height: int, width: int, config: VisionConfig, limits: TokenLimits) -> Cut:
    patch = config.patch_size
    how: dict[str, Any] = {"patch": patch, "merge": 1, "n_queries": config.n_queries}
    grid = slices(height, width)
    if grid is None:
        return Cut(BICUBIC, (area_size(height, width, patch),), ("<image>", 0, "</image>"), **how)
    rows, columns = grid
    cell = area_size(multiple(height, rows) / rows, multiple(width, columns) / columns, patch)
    is_nested = config.minicpmv_version == NESTED
    begin, end = ("<image>", "</image>") if is_nested else ("<slice>", "</slice>")
    layout: list[str | int] = ["<image>", rows * columns, "</image>"]
    layout += ["<slice>"] if is_nested else []
    for i in range(rows * columns):
        layout += [f"\n{begin}" if i and i % columns == 0 else begin, i, end]
    layout += ["</slice>"] if is_nested else []
    size = cell[0] * rows, cell[1] * columns
    overview = Overview(area_size(height, width, patch), from_original=True)
    return Cut(BICUBIC, (size,), tuple(layout), grid=grid, overview=overview, **how)


def slices(height: int, width: int) -> Size | None:
    """Return the rows and columns of slices whose ratio is nearest to the picture's, or None if the picture
    has at most the area of one tile. If grids are equally near, the one with more rows is taken."""
    n = min(math.ceil(width * height / SIDE**2), MAX_SLICES)
    if n <= 1:
        return None
    wanted, best, grid = math.log(width / height), math.inf, (1, 1)
    for count in (n - 1, n, n + 1):
        if count == 1 or count > MAX_SLICES:
            continue
        for rows in range(1, count + 1):
            if count % rows:
                continue
            error = abs(wanted - math.log(count // rows / rows))
            if error < best or (error == best and rows > grid[0]):
                best, grid = error, (rows, count // rows)
    return grid


def area_size(height: float, width: float, patch: int) -> Size:
    """Return the size of a picture of this ratio with about SIDE^2 pixels, in complete patches."""
    ratio = width / height
    height = int(SIDE / math.sqrt(ratio))
    return multiple(height, patch), multiple(int(height * ratio), patch)


def multiple(length: int, of: int) -> int:
    """Return the multiple of `of` that is nearest to `length`, at least `of`."""
    return max(round(length / of) * of, of)
