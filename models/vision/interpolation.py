"""Interpolates tables of position embeddings to another grid, in float64."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def resized(table: np.ndarray, grid: tuple[int, int], *, align_corners: bool, antialias: bool) -> np.ndarray:
    """Interpolate a square table [side^2, n] linearly to a grid (height, width), as torch does. Return f32
    [height * width, n]. If `align_corners`, the corners keep their values; otherwise pixels are areas, and
    `antialias` widens the filter when the table shrinks."""
    side = round(len(table) ** 0.5)
    rows, columns = (linear_weights(side, n, align_corners, antialias) for n in grid)
    return _applied(table, rows, columns)


def resized_cubic(table: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Interpolate a square table [side^2, n] to a grid (height, width) with cubic convolution (Keys 1981), as
    torch does without aligned corners and antialiasing. Return f32 [height * width, n]."""
    side = round(len(table) ** 0.5)
    return _applied(table, *(cubic_weights(side, n) for n in grid))


def _applied(table: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    side = rows.shape[1]
    square = table.reshape(side, side, -1).astype(np.float64)
    values = np.einsum("ij,jkd,lk->ild", rows, square, columns, optimize=True)
    return values.reshape(len(rows) * len(columns), -1).astype(np.float32)


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


CUBIC = -0.75  # torch's parameter of the cubic filter


@lru_cache(64)
def cubic_weights(n_in: int, n_out: int) -> np.ndarray:
    """Return the weights of the inputs in each output, float64 [n_out, n_in]. Each output depends on four
    inputs. Inputs beyond the ends equal the first or the last input."""
    at = (np.arange(n_out) + 0.5) * n_in / n_out - 0.5
    first = np.floor(at).astype(int) - 1
    weights = np.zeros((n_out, n_in))
    for i in range(n_out):
        for tap in range(first[i], first[i] + 4):
            weights[i, min(max(tap, 0), n_in - 1)] += _cubic(abs(at[i] - tap))
    return weights


def _cubic(x: float) -> float:
    if x <= 1:
        return ((CUBIC + 2) * x - (CUBIC + 3)) * x * x + 1
    return ((CUBIC * x - 5 * CUBIC) * x + 8 * CUBIC) * x - 4 * CUBIC
