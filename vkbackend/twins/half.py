from __future__ import annotations

from typing import Any

import numpy as np

from vkbackend.twins.arrays import Array


def pack_f16(x: Array, y: Array, *, k: int, n_rows: int, **_: Any) -> None:
    """Write each row as x / s in F16, padded with zeros to a multiple of 32 elements, followed by s. The
    scale s is the largest power of two that does not exceed max |x|. Tests compare the bits."""
    rows = x.reshape(-1)[: n_rows * k].reshape(n_rows, k)
    top = np.abs(rows).max(axis=1)
    exponent = np.clip(np.where(np.isfinite(top), top, 1).view(np.uint32) >> 23, 1, 253)
    exponent = np.where(np.isfinite(top) & (top > 0), exponent, 127).astype(np.uint32)
    scaled = rows * (254 - exponent << 23).view(np.float32)[:, None]
    out = y.reshape(n_rows, -1)
    out[:] = 0
    with np.errstate(over="ignore"):
        out[:, : 2 * k] = scaled.astype(np.float16).view(np.uint8)
    out[:, -16:-12] = (exponent << 23)[:, None].view(np.uint8)
