from __future__ import annotations

from typing import Any

import numpy as np

from vkbackend.step import StepParams
from vkbackend.twins.arrays import Array


def rows_before(
    x: Array,
    kept: Array,
    y: Array,
    step: StepParams,
    *,
    n: int,
    n_rows: int,
    n_kept: int,
    has_x: int,
    **_: Any,
) -> None:
    out, held = y.reshape(n_rows, n), kept.reshape(-1, n_kept, n)
    out[:] = 0.0
    for r in range(min(step.n_rows, n_rows)):
        position, slot = (int(value) for value in step.rows[r, :2])
        if position == 0:
            continue
        within = has_x and r and step.rows[r - 1, 1] == slot
        out[r] = x.reshape(-1, n)[r - 1] if within else held[slot, (position - 1) % n_kept]


def keep_rows(x: Array, kept: Array, step: StepParams, *, n: int, n_rows: int, n_kept: int, **_: Any) -> None:
    held, rows = kept.reshape(-1, n_kept, n), x.reshape(-1, n)
    for r in range(min(step.n_rows, n_rows)):  # Later rows replace earlier rows.
        position, slot = step.rows[r, :2].astype(np.int64)
        held[slot, position % n_kept] = rows[r]
