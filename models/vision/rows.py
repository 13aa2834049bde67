"""One picture as the text model receives it: rows in place of token embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

KEY_NBYTES = 16


@dataclass(frozen=True, eq=False)
class ImageRows:
    """`values` is f32 [n_rows, n_embd * (1 + n_deepstack)]. Equal keys mean equal rows: the key hashes the
    decoded pixels, the projector's file, the preprocessing's parameters, and the index of the tile."""

    key: bytes  # KEY_NBYTES bytes
    values: np.ndarray
    grid: tuple[int, int]  # Height and width in rows for M-RoPE, else (1, n_rows).
    both_ways: bool  # Whether each row of the picture attends to all of the picture's rows.

    @property
    def n_rows(self) -> int:
        return len(self.values)
