from __future__ import annotations

from typing import Any

import numpy as np

from vkbackend.ops.low_rank import NO_ADAPTER
from vkbackend.twins.arrays import Array, f64


def low_rank_add(
    w: Array, t: Array, ids: Array, scales: Array, starts: Array, x: Array, y: Array, *, n: int,
    y_stride: int, w_stride: int, rank: int, t_stride: int, n_rows: int, n_used: int, n_terms: int,
    s_stride: int, s_first: int, first: int, count: int, stacked: int = 0, **_: Any,
) -> None:  # fmt: skip
    """If stacked is 0, `w` is [n, w_stride], with `rank` columns per adapter. Otherwise adapter e has rows
    starts[e]..starts[e + 1] of w [., rank]."""
    ids, terms = ids.reshape(-1), t.reshape(-1)
    for p in range(n_rows):
        total, width = f64(x.reshape(-1)[p * y_stride :], n), 0 if stacked else n
        for u in range(n_terms):
            e, at = int(ids[p * n_terms + u]), (p * n_terms + u) * t_stride
            if not first <= e < first + count:
                continue
            if stacked:
                begin, end = int(starts[e]), int(starts[e + 1])
                width = end - begin
                matrix = f64(w.reshape(-1)[(begin - int(starts[first])) * rank :], width, rank)
            else:
                matrix = f64(w, n, w_stride)[:, e * rank : (e + 1) * rank]
            scale = float(scales.reshape(-1)[p // n_used * s_stride + s_first + u])
            total[:width] += scale * (matrix @ f64(terms[at:], rank))
        y.reshape(-1)[p * y_stride :][:width] = total[:width]


def adapter_experts(
    adapters: Array, experts: Array, ids: Array, *, n_rows: int, n_used: int, n_terms: int, term: int,
    n_experts: int, **_: Any,
) -> None:  # fmt: skip
    first = adapters.reshape(-1)[: n_rows * n_terms].reshape(n_rows, n_terms)[:, term, None]
    pairs = first * np.uint32(n_experts) + experts.reshape(-1)[: n_rows * n_used].reshape(n_rows, n_used)
    ids.reshape(-1)[: n_rows * n_used] = np.where(first == NO_ADAPTER, NO_ADAPTER, pairs).reshape(-1)
