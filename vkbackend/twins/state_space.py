from __future__ import annotations

from typing import Any

import numpy as np

from vkbackend.step import StepParams
from vkbackend.twins.arrays import Array, f64
from vkbackend.twins.recurrent import runs_of


def ssm_scan(
    x: Array, bc: Array, dt: Array, bias: Array, a: Array, d: Array, state: Array, y: Array, step: StepParams,
    *, n_heads: int, n_groups: int, group: int, first: int, n_rows: int, p: int, n: int, row_states: int = 0,
    **_: Any,
) -> None:  # fmt: skip
    values, cells = f64(x, n_rows, n_heads, p), state.reshape(-1, n_heads, n, p)
    both = f64(bc, n_rows, 2, n_groups, n)[:, :, (np.arange(n_heads) + first) // group]
    times = np.logaddexp(0.0, f64(dt, n_rows, n_heads) + f64(bias, n_heads))
    kept, skip = np.exp(times * f64(a, n_heads)), f64(d, n_heads, 1)
    out = y.reshape(n_rows, n_heads, p)
    out[step.n_rows :] = 0.0
    for begin, n_run, read, written, is_fresh in runs_of(step):
        m = np.zeros((n_heads, n, p)) if is_fresh else cells[read].astype(np.float64)
        for t in range(begin, begin + n_run):
            added = times[t, :, None] * both[t, 0]
            m = m * kept[t, :, None, None] + added[:, :, None] * values[t, :, None, :]
            out[t] = np.einsum("hij,hi->hj", m, both[t, 1]) + skip * values[t]
            if row_states:
                cells[step.cells_after[t]] = m
        cells[written] = m


def selective_scan(
    x: Array, dt: Array, b: Array, c: Array, a: Array, d: Array, state: Array, y: Array, step: StepParams,
    *, width: int, n_rows: int, n: int, row_states: int = 0, **_: Any,
) -> None:  # fmt: skip
    values, before = f64(x, n_rows, width), f64(dt, n_rows, width)
    rows_b, rows_c, decay = f64(b, n_rows, n), f64(c, n_rows, n), f64(a, width, n)
    cells, out = state.reshape(-1, width, n), y.reshape(n_rows, width)
    out[step.n_rows :] = 0.0
    for begin, n_run, read, written, is_fresh in runs_of(step):
        m = np.zeros((width, n)) if is_fresh else cells[read].astype(np.float64)
        for t in range(begin, begin + n_run):
            time = np.logaddexp(0.0, before[t])
            m = np.exp(time[:, None] * decay) * m + (time * values[t])[:, None] * rows_b[t]
            out[t] = m @ rows_c[t] + f64(d, width) * values[t]
            if row_states:
                cells[step.cells_after[t]] = m
        cells[written] = m


def _gated(z: Array, x: Array, n_rows: int, width: int, has_z: int) -> Array:
    values = f64(x, n_rows, width)
    if not has_z:
        return values
    gate = f64(z, n_rows, width)
    return gate / (1.0 + np.exp(np.minimum(-gate, 700.0))) * values


def group_squares(
    z: Array, x: Array, squares: Array, *, width: int, first: int, skip: int, group: int, n_groups: int,
    n_rows: int, has_z: int = 0, **_: Any,
) -> None:  # fmt: skip
    whole = np.zeros((n_rows, n_groups * group))
    whole[:, first + skip : first + width] = _gated(z, x, n_rows, width, has_z)[:, skip:]
    squares.reshape(n_rows, n_groups)[:] = (whole * whole).reshape(n_rows, n_groups, group).sum(axis=2)


def group_norm(
    z: Array, x: Array, squares: Array, w: Array, y: Array, *, width: int, first: int, group: int,
    n_groups: int, n_rows: int, eps: float, has_z: int = 0, **_: Any,
) -> None:  # fmt: skip
    means = f64(squares, n_rows, n_groups)[:, (first + np.arange(width)) // group] / group
    values = _gated(z, x, n_rows, width, has_z)
    y.reshape(n_rows, width)[:] = values / np.sqrt(means + eps) * f64(w, width)
