from __future__ import annotations

from typing import Any

import numpy as np

from vkbackend.formats import dequantize
from vkbackend.twins.arrays import Array, f64
from vkbackend.twins.elementwise import glu


def mat_mul(
    w: Array, x: Array, b: Array, y: Array, *, k: int, n: int, n_rows: int, y_stride: int, has_bias: int = 0,
    **_: Any,
) -> None:  # fmt: skip
    with np.errstate(invalid="ignore"):  # F16 may be NaN
        product = f64(x, n_rows, k) @ f64(w, n, k).T
    if has_bias:
        product += f64(b, n)
    _put_rows(y, product, y_stride)


def mat_vec(
    w: Array, x: Array, b: Array, y: Array, *, k: int, n: int, n_rows: int, y_stride: int, has_bias: int = 0,
    act: int = 0, up_at: int = 0, variant: str = "f32", **_: Any,
) -> None:  # fmt: skip
    """If `act` is set, compute act(w x) * (up x). Then `w` is an array of words, with one matrix at word 0
    and `up` at word up_at."""
    if not act:
        mat_mul(w, x, b, y, k=k, n=n, n_rows=n_rows, y_stride=y_stride, has_bias=has_bias)
        return
    rows = f64(x, n_rows, k)
    gate, up = (
        rows @ dequantize(w[at:].view(np.uint8), variant, (n, k)).T.astype(float) for at in (0, up_at)
    )
    product = np.empty(gate.shape)
    glu(gate, up, product, n=gate.size, act=act - 1)
    _put_rows(y, product, y_stride)


def _put_rows(y: Array, rows: Array, y_stride: int) -> None:
    flat = y.reshape(-1)
    for r, row in enumerate(rows):
        flat[r * y_stride : r * y_stride + len(row)] = row
