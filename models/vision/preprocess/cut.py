"""Describes how pictures of one size are resized and cut into tiles, and computes their pixels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

Size = tuple[int, int]  # height, width
BILINEAR, BICUBIC, LANCZOS = Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS


@dataclass(frozen=True, slots=True)
class Overview:
    """One more tile, which shows the complete picture. It is resized from the original picture if
    `from_original` is set, and otherwise from the picture that is cut into tiles."""

    size: Size
    from_original: bool


@dataclass(frozen=True, slots=True)
class Cut:
    """The picture is resized to each of `sizes` in turn, and the last result is cut into a grid of tiles."""

    filter: Image.Resampling
    sizes: tuple[Size, ...]
    layout: tuple[str | int, ...]  # Picture.layout
    patch: int  # side of a patch in pixels
    merge: int  # side, in patches, of the square that becomes a row
    grid: Size = (1, 1)  # rows and columns of tiles
    overview: Overview | None = None
    n_marks: int = 0  # rows that the projector adds to a tile, such as [IMG_BREAK]
    n_queries: int = 0  # number of rows of each tile, if it does not depend on the tile's size
    square: tuple[int, ...] | None = (
        None  # color of a square on which the picture is centered before it is resized
    )
    canvas: Size | None = None  # size of a black canvas with the resized picture at its top left

    @property
    def tile(self) -> Size:
        (height, width), (rows, columns) = self.canvas or self.sizes[-1], self.grid
        return height // rows, width // columns

    @property
    def tile_rows(self) -> tuple[int, ...]:
        """Return the number of rows of each tile in the text model."""
        of_tile = self._rows(self.tile) + self.n_marks
        tiles = (of_tile,) * (self.grid[0] * self.grid[1])
        return (*tiles, self._rows(self.overview.size)) if self.overview else tiles

    @property
    def n_rows(self) -> int:
        return sum(self.tile_rows)

    def _rows(self, size: Size) -> int:
        if self.n_queries:
            return self.n_queries
        side = self.patch * self.merge
        return size[0] // side * (size[1] // side)

    def tiles(self, pixels: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the pixels of each tile, in raster order, then the overview. Pixels are u8 [h, w, 3]."""
        original = image = self._squared(Image.fromarray(pixels))
        for size in self.sizes:
            image = self._resized(image, size)
        if self.canvas:
            small, image = image, Image.new("RGB", self.canvas[::-1])
            image.paste(small)
        resized, (height, width) = np.asarray(image), self.tile
        for row in range(self.grid[0]):
            for column in range(self.grid[1]):
                yield resized[row * height :, column * width :][:height, :width]
        if self.overview:
            source = original if self.overview.from_original else image
            yield np.asarray(self._resized(source, self.overview.size))

    def _squared(self, image: Image.Image) -> Image.Image:
        if self.square is None or image.width == image.height:
            return image
        side = max(image.size)
        square = Image.new("RGB", (side, side), self.square)
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return square

    def _resized(self, image: Image.Image, size: Size) -> Image.Image:
        return image.resize((size[1], size[0]), self.filter)


def normalized(pixels: np.ndarray, mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    """Return (pixels / 255 - mean) / std, f32 [height, width, 3], of pixels u8.

    The 256 values of a channel are computed once, in transformers' order: scaled in double precision, then in
    single precision.
    """
    levels = (np.arange(256) * (1 / 255)).astype(np.float32)
    out = np.empty(pixels.shape, np.float32)
    for c in range(3):
        np.take((levels - np.float32(mean[c])) / np.float32(std[c]), pixels[..., c], out=out[..., c])
    return out
