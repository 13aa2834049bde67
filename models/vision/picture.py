"""A picture after preprocessing: patches for the encoder, and the text around the rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Tile:
    """The input of one run of the encoder.

    `patches` is f32 [n_patches, 3 * patch * patch]; the columns are in the order (channel, y, x). Patches
    that become one row of the result are consecutive. These groups, and the patches inside each group, are in
    raster order.
    """

    patches: np.ndarray
    grid: tuple[int, int]  # Patches: height and width.


@dataclass(frozen=True, eq=False)
class Picture:
    """`layout` lists texts and tile indices in the order of the prompt. An index represents the rows of its
    tile. An example is ("<fake_token_around_image><row_1_col_1>", 0, ...,
    "\\n\\n<fake_token_around_image><global-img>", 4, ...).
    """

    key: bytes  # rows.KEY_NBYTES bytes: a hash of the pixels, the projector's file and the parameters.
    tiles: tuple[Tile, ...]
    layout: tuple[str | int, ...]
