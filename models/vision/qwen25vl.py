"""qwen2.5vl_merger (Qwen2.5-VL): qwen_vl.py with RMS norms and SwiGLU. Most layers attend only to windows of
112 x 112 pixels. Bai et al. 2025, arXiv:2502.13923.
"""

from __future__ import annotations

import numpy as np

from vkbackend.errors import GGUFError
from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.vision.config import WINDOW
from vkbackend.models.vision.patches import patch_windows
from vkbackend.models.vision.picture import Tile
from vkbackend.models.vision.qwen_vl import QwenVL


class Model(QwenVL):
    """The encoder computes the squares of patches by windows, and returns them in raster order."""

    text_architectures = ("qwen2vl",)
    gated = True
    has_windows = True

    def check(self) -> None:
        c = self.config
        if not (c.n_wa_pattern or c.full_layers):
            raise GGUFError(f"{self._path}: the metadata key 'clip.vision.n_wa_pattern' is missing")

    def sees_all(self, il: int) -> bool:
        c = self.config
        return il in c.full_layers if c.full_layers else (il + 1) % c.n_wa_pattern == 0

    def _windows(self, grid: tuple[int, int]) -> list[np.ndarray]:
        merge = self.merge
        squares = grid[0] // merge, grid[1] // merge
        return patch_windows(squares, WINDOW // self.config.patch_size // merge)

    def windows(self, grid: tuple[int, int]) -> list[int]:
        sizes = [self.n_merged * len(window) for window in self._windows(grid)]
        return [0, *np.cumsum(sizes[:-1]).tolist()]

    def tables(self, tile: Tile) -> dict[str, np.ndarray]:
        order = np.concatenate(self._windows(tile.grid))
        patches = (order[:, None] * self.n_merged + np.arange(self.n_merged)).reshape(-1)
        return {name: rows[patches] for name, rows in super().tables(tile).items()}

    def arranged(self, rows: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        raster = np.empty_like(rows)
        raster[np.concatenate(self._windows(grid))] = rows
        return raster

    def norm(self, x: Tensor, w: Weights, name: str) -> Tensor:
        return ops.rms_norm(x, w(name), self.config.eps)
