"""Interpolates tables of position embeddings to another grid, in float64."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def resized(table: np.ndarray, grid: tuple[int, int], *, align_corners: bool, antialias: bool) -> np.ndarray:
    """Interpolate a square table [side^2, n] linearly to a grid (height, width), as torch does.
    Return f32 [height * width, n]. If `align_corners`, the corners keep their values; otherwise pixels are
    areas, and `antialias` widens the filter when it shrinks the table."""
    side = round(len(table) ** 0.5)
    rows, columns = (linear_weights(side, n, align_corners, antialias) for n in grid)
    square = table.reshape(side, side, -1).astype(np.float64)
    values = np.einsum("ij,jkd,lk->ild", rows, square, columns, optimize=True)
    return values.reshape(grid[0] * grid[1], -1).astype(np.float32)


@lru_cache(64)
def linear_weights(n_in: int, n_out: int, align_corners: bool, antialias: bool) -> np.ndarray:
    """Return the weights of the inputs in each output, float64 [n_out, n_in]."""
    if align_corners:
        at = np.linspace(0, n_in - 1, n_out) if n_out > 1 else np.zeros(1)
        support = 1.0
    else:
        at = (np.arange(n_out) + 0.5) * n_in / n_out - 0.5
        support = max(1.0, n_in / n_out) if antialias else 1.0
        at = at if antialias else np.clip(at, 0, n_in - 1)
    weights = np.maximum(0, 1 - abs(at[:, None] - np.arange(n_in)) / support)
    return weights / weights.sum(axis=1, keepdims=True)
