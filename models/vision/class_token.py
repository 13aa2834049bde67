"""Encoders with a class token, which sees all patches and is seen by them."""

from __future__ import annotations

import numpy as np

from vkbackend.errors import GGUFError
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.vision.encoder import PATCHES, POSITIONS, Encoder, read_matrix
from vkbackend.models.vision.patches import patch_order
from vkbackend.models.vision.picture import Tile

CLASS = "v.class_embd"


class WithClassToken(Encoder):
    """The class token is the last row here, so that patches begin at row 0. Its pixels are zeros."""

    n_extra = 1
    class_position = 0  # the class token's row of the table of positions

    def __init__(self, gguf: GGUF) -> None:
        super().__init__(gguf)
        if CLASS not in gguf.tensors or self.positions is None:
            raise GGUFError(f"{self._path}: the file has no embedding of a class token ({CLASS})")
        # The class token's pixels are zeros, so its patch embedding is only the bias, which is subtracted
        # here.
        bias = read_matrix(gguf, "v.patch_embd.bias")[0] if "v.patch_embd.bias" in gguf.tensors else 0
        position = self.positions[self.class_position]
        self._class: np.ndarray = read_matrix(gguf, CLASS).reshape(1, -1) + position - bias
        self._patch_positions = np.delete(self.positions, self.class_position, axis=0)

    def check(self) -> None:
        c = self.config
        side = c.image_size // c.patch_size
        shape = None if self.positions is None else self.positions.shape
        if c.image_size % c.patch_size or side % c.merge or shape != (side**2 + 1, c.n_embd):
            raise GGUFError(
                f"{self._path}: {side} x {side} patches with a table of positions of shape {shape}, expected "
                f"{side**2 + 1, c.n_embd}, and squares of {c.merge} x {c.merge} patches"
            )

    def position_rows(self, grid: tuple[int, int]) -> np.ndarray:
        rows: np.ndarray = self._patch_positions[patch_order(grid, self.merge)]
        return rows

    def tables(self, tile: Tile) -> dict[str, np.ndarray]:
        tables = super().tables(tile)
        ends = {PATCHES: np.zeros((1, self.n_pixels), np.float32), POSITIONS: self._class}
        return {name: np.concatenate([rows, ends[name]]) for name, rows in tables.items()}

    def unread(self) -> set[str]:
        return super().unread() | {CLASS}
