"""Twin of 8-bit activations. All devices must produce the same codes, so the twin computes in float32 in
shader order."""

from __future__ import annotations

from typing import Any

import numpy as np

from vkbackend.twins.arrays import Array
from vkbackend.twins.moe import exact_reciprocal


def quantize_q8(x: Array, y: Array, *, k: int, n_rows: int, **_: Any) -> None:
    """A row consists of int8 codes, then a scale and the sums of both halves for each block of 32."""
    blocks = x.reshape(-1)[: n_rows * k].reshape(-1, 32)
    top = np.abs(blocks).max(axis=1)  # NaN if an element is NaN
    usable = np.isfinite(top) & (top >= np.float32(2.0**-115))
    d = np.where(usable, top, np.float32(127)) * np.float32(1 / 127)
    scaled = np.where(usable[:, None], blocks, np.float32(0)) * exact_reciprocal(d)[:, None]
    codes = np.rint(scaled).astype(np.int8)
    out = y.reshape(n_rows, 10 * (k // 32) * 4)
    out[:, :k] = codes.reshape(n_rows, k).view(np.uint8)
    scales = np.zeros((len(blocks), 2), np.uint32)
    scales[usable, 0] = d[usable].view(np.uint32)
    scales[~np.isfinite(top), 0] = 0x7FC00000
    scales[:, 1] = codes.reshape(-1, 2, 16).sum(axis=2, dtype=np.int16).view(np.uint32)[:, 0]
    out[:, k:] = scales.reshape(n_rows, -1).view(np.uint8)
