from __future__ import annotations

from typing import Any

import numpy as np

from vkbackend.twins.arrays import Array, f64


def mat_heads(w: Array, x: Array, y: Array, *, k: int, n: int, n_heads: int, n_rows: int, **_: Any) -> None:
    product = np.einsum("hik,rhk->rhi", f64(w, n_heads, n, k), f64(x, n_rows, n_heads, k))
    y.reshape(-1)[: product.size] = product.reshape(-1)


def concat(a: Array, b: Array, y: Array, *, n_a: int, n_b: int, n_rows: int, times: int, **_: Any) -> None:
    parts = (a, n_a, n_rows), (b, n_b, n_rows // times)
    both = [x.reshape(-1)[: rows * n].reshape(rows, n) for x, n, rows in parts]
    both[1] = both[1].repeat(times, axis=0)
    y.reshape(-1)[: n_rows * (n_a + n_b)] = np.concatenate(both, axis=1).reshape(-1)
