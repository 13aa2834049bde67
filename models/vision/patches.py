"""The patches of a picture in the order that projectors need, and the RoPE of their rows and columns."""

from __future__ import annotations

import numpy as np


def patch_order(grid: tuple[int, int], merge: int) -> np.ndarray:
    """Return the raster index of each patch, int64 [height * width]. Squares of merge x merge patches are in
    raster order, and so are the patches inside each square. `grid` is (height, width) in patches, multiples
    of `merge`."""
    height, width = grid
    assert height % merge == 0 and width % merge == 0, (grid, merge)
    raster = np.arange(height * width).reshape(height // merge, merge, width // merge, merge)
    return np.ascontiguousarray(raster.transpose(0, 2, 1, 3)).reshape(-1)


def patch_positions(grid: tuple[int, int], merge: int) -> np.ndarray:
    """Return the row and the column of each patch in `patch_order`, int64 [height * width, 2]."""
    return np.stack(np.divmod(patch_order(grid, merge), grid[1]), axis=1)


def patch_windows(grid: tuple[int, int], side: int) -> list[np.ndarray]:
    """Return the raster indices of each window of side x side, in raster order. Windows at the right and the
    lower edge may be smaller. `grid` is (height, width)."""
    raster = np.arange(grid[0] * grid[1]).reshape(grid)
    corners = [(y, x) for y in range(0, grid[0], side) for x in range(0, grid[1], side)]
    return [raster[y : y + side, x : x + side].reshape(-1) for y, x in corners]


def cut_patches(pixels: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """Return the patches of pixels f32 [height, width, 3] in `patch_order`, f32 [n_patches, 3 * patch^2]. The
    columns are in the order (channel, y, x)."""
    height, width, channels = pixels.shape
    grid = height // patch, width // patch
    cut = pixels.reshape(grid[0], patch, grid[1], patch, channels).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(cut.reshape(grid[0] * grid[1], -1)[patch_order(grid, merge)], np.float32)


def axial_rope(at: np.ndarray, head_dim: int, base: float) -> np.ndarray:
    """Return cos and sin for the positions `at` [n, 2], f32 [n, head_dim / 2, 2]. The first half of the pairs
    rotates by the row, the second half by the column. Pair i of m pairs has the frequency base^(-i / m)."""
    m = head_dim // 4
    frequencies = base ** (-np.arange(m) / m)
    angles = (at[:, :, None] * frequencies).reshape(len(at), 2 * m)
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
