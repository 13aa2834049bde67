"""Rules that several families share: a size within limits, and a grid of tiles."""

from __future__ import annotations

import math

from vkbackend.models.vision.preprocess.cut import Size


def within_limits(height: int, width: int, side: int, least: int, most: int, n_min: int = 0) -> Size:
    """Return the nearest size in multiples of `side` with `least` to `most` pixels and about a picture's
    aspect ratio. This is `smart_resize` of Qwen2-VL (Wang et al. 2024, arXiv:2409.12191), whose rounding is
    half to even. `n_min` is the least multiple before the limits are applied. Unlike `smart_resize`, the
    result never has more than `most` pixels, even if the picture is small or very narrow."""
    rows, columns = max(n_min, round(height / side)), max(n_min, round(width / side))
    if rows * columns * side**2 > most:
        shrink = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(n / shrink / side)) for n in (height, width))
    elif rows * columns * side**2 < least:
        grow = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(n * grow / side) for n in (height, width))
    n_most = max(1, most // side**2)
    if rows * columns > n_most and rows <= columns:
        columns = max(1, n_most // rows)
    elif rows * columns > n_most:
        rows = max(1, n_most // columns)
    return rows * side, columns * side


def nearest_grid(height: int, width: int, tile: int, least: int, most: int) -> Size:
    """Return the rows and columns, `least` to `most` tiles, whose aspect ratio is nearest to the aspect ratio
    of a picture. If ratios are equal, the larger grid is taken if the picture has more than half of that
    grid's pixels. This is InternVL 1.5's rule (Chen et al. 2024, arXiv:2404.16821)."""
    grids = [
        (columns, rows)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if least <= columns * rows <= most
    ]
    nearest, best = (1, 1), math.inf
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - columns / rows)
        larger = height * width > 0.5 * tile * tile * columns * rows
        if distance < best or (distance == best and larger):
            nearest, best = (columns, rows), distance
    return nearest[1], nearest[0]


def tile_texts(rows: int, columns: int, begin: str, after_row: str = "") -> list[str | int]:
    """For each tile, return the text before the tile, and the tile's index. `begin` has the fields {row} and
    {column}, which count from 1; `after_row` is the text between two rows of tiles."""
    layout: list[str | int] = []
    for row in range(rows):
        for column in range(columns):
            text = begin.format(row=row + 1, column=column + 1)
            if row and not column:
                text = after_row + text
            layout += [text, row * columns + column]
    return layout
