from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from vkbackend.step import StepParams
from vkbackend.twins.arrays import Array, f64


def runs_of(step: StepParams) -> Iterator[tuple[int, int, int, int, bool]]:
    """Yield each run as (first row, number of rows, cell to read, cell to write, whether its first position
    is 0)."""
    runs = zip(step.runs[: step.n_runs].tolist(), step.states.tolist(), strict=False)
    for (_, first, n, position), (read, written, *_) in runs:
        yield first, n, read, written, position == 0


def _strided(x: Array, n_rows: int, stride: int, n_heads: int, size: int) -> Array:
    at = np.arange(n_rows)[:, None] * stride + np.arange(n_heads * size)
    return x.reshape(-1)[at].reshape(n_rows, n_heads, size).astype(np.float64)


def ssm_conv(
    x: Array, w: Array, b: Array, state: Array, y: Array, step: StepParams, *, width: int, n_rows: int,
    d_conv: int, silu: int = 1, has_b: int = 0, row_states: int = 0, **_: Any,
) -> None:  # fmt: skip
    rows, taps, out = x.reshape(n_rows, width), f64(w, width, d_conv), y.reshape(n_rows, width)
    bias = f64(b, width) if has_b else 0.0
    cells = state.reshape(-1, width, d_conv - 1)
    for first, n, read, written, is_fresh in runs_of(step):
        before = np.zeros((d_conv - 1, width)) if is_fresh else cells[read].T.astype(np.float64)
        columns = np.concatenate([before, rows[first : first + n].astype(np.float64)])
        total = bias + sum(columns[j : j + n] * taps[:, j] for j in range(d_conv))
        out[first : first + n] = total / (1.0 + np.exp(np.minimum(-total, 700.0))) if silu else total
        cells[written] = columns[n:].T
        for t in range(n) if row_states else ():
            cells[step.cells_after[first + t]] = columns[t + 1 : t + d_conv].T


def l2_norm(
    x: Array, y: Array, *, n: int, n_heads: int, x_stride: int, n_rows: int, eps: float, **_: Any
) -> None:
    heads = _strided(x, n_rows, x_stride, n_heads, n)
    y.reshape(heads.shape)[:] = heads / np.sqrt((heads * heads).sum(axis=2, keepdims=True) + eps)


def delta_gates(
    a: Array, dt: Array, decay: Array, b: Array, g: Array, beta: Array, *, n_heads: int, width: int,
    n_rows: int, bound: float = 0.0, bounded: int = 0, **_: Any,
) -> None:  # fmt: skip
    value, rate = f64(a, n_rows, n_heads, width) + f64(dt, n_heads, width), f64(decay, n_heads, 1)
    g.reshape(value.shape)[:] = np.logaddexp(0.0, value) * rate
    if bounded:
        g.reshape(value.shape)[:] = bound / (1.0 + np.exp(np.minimum(-np.abs(rate) * value, 700.0)))
    beta.reshape(n_rows, n_heads)[:] = 1.0 / (1.0 + np.exp(np.minimum(-f64(b, n_rows, n_heads), 700.0)))


def _key_heads(n_heads: int, n_k: int, tiled: int) -> Array:
    return np.arange(n_heads) % n_k if tiled else np.arange(n_heads) // (n_heads // n_k)


def delta_net(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, y: Array, step: StepParams, *,
    n_heads: int, n_k: int, tiled: int, q_stride: int, v_stride: int, n_rows: int, scale: float, s: int,
    kda: int = 0, row_states: int = 0, **_: Any,
) -> None:  # fmt: skip
    heads = _key_heads(n_heads, n_k, tiled)
    queries, keys = (_strided(x, n_rows, q_stride, n_k, s)[:, heads] for x in (q, k))
    values, gates = _strided(v, n_rows, v_stride, n_heads, s), f64(g, n_rows, n_heads, s if kda else 1)
    weights, cells = f64(beta, n_rows, n_heads, 1), state.reshape(-1, n_heads, s, s)
    out = y.reshape(n_rows, n_heads, s)
    out[step.n_rows :] = 0.0
    for first, n, read, written, is_fresh in runs_of(step):
        m = np.zeros((n_heads, s, s)) if is_fresh else cells[read].astype(np.float64)
        for t in range(first, first + n):
            m = m * np.exp(gates[t])[:, :, None]
            d = weights[t] * (values[t] - np.einsum("hij,hi->hj", m, keys[t]))
            m = m + keys[t][:, :, None] * d[:, None, :]
            out[t] = scale * np.einsum("hij,hi->hj", m, queries[t])
            if row_states:
                cells[step.cells_after[t]] = m
        cells[written] = m


def delta_chunk(
    q: Array, k: Array, v: Array, g: Array, beta: Array, work: Array, step: StepParams, *, n_heads: int,
    n_k: int, tiled: int, q_stride: int, v_stride: int, n_rows: int, scale: float, s: int, c: int,
    kda: int = 0, **_: Any,
) -> None:  # fmt: skip
    """Write to `work` for each chunk: u, w, q' = scale e^c q, k' = e^(c_last - c) k, e^c_last, and the
    products P_ts = scale q_t D_ts k_s. Here c_t is the sum of g up to row t of the chunk, and D_ts = e^(c_t -
    c_s)."""
    heads = _key_heads(n_heads, n_k, tiled)
    queries, keys = (_strided(x, n_rows, q_stride, n_k, s)[:, heads] for x in (q, k))
    values, gates = _strided(v, n_rows, v_stride, n_heads, s), f64(g, n_rows, n_heads, s if kda else 1)
    weights, out = f64(beta, n_rows, n_heads, 1), work.reshape(n_rows, n_heads, 5 * s + c)
    for first, n, *_cells in runs_of(step):
        for begin in range(first, first + n, c):
            rows = slice(begin, min(begin + c, first + n))
            n_chunk = rows.stop - begin
            qc, kc, vc, b = queries[rows], keys[rows], values[rows], weights[rows]
            sums = np.cumsum(gates[rows], axis=0)
            lower = np.tril(np.ones((n_chunk, n_chunk)))[:, :, None, None]
            decay = np.exp((sums[:, None] - sums[None]) * lower) * lower  # [t, s, head, channel]
            kk = np.einsum("thi,shi,tshi->hts", kc, kc, np.broadcast_to(decay, (*decay.shape[:3], s)))
            qk = np.einsum("thi,shi,tshi->hts", qc, kc, np.broadcast_to(decay, (*decay.shape[:3], s)))
            system = np.eye(n_chunk) + np.tril(b[:, :, 0].T[:, :, None] * kk, -1)
            right = np.concatenate([b * vc, b * np.exp(sums) * kc], axis=2).swapaxes(0, 1)
            out[rows, :, : 2 * s] = np.linalg.solve(system, right).swapaxes(0, 1)
            out[rows, :, 2 * s : 3 * s] = scale * np.exp(sums) * qc
            out[rows, :, 3 * s : 4 * s] = np.exp(sums[-1] - sums) * kc
            out[begin, :, 4 * s : 5 * s] = np.exp(sums[-1])
            for t in range(n_chunk):
                out[begin + t, :, 5 * s : 5 * s + t + 1] = scale * qk[:, t, : t + 1]


def delta_scan(
    work: Array, state: Array, y: Array, step: StepParams, *, n_heads: int, n_rows: int, s: int, c: int,
    **_: Any,
) -> None:  # fmt: skip
    """Compute for each chunk x = u - w M, y = q' M + P x, and the new state M = e^c_last M + k'^T x."""
    parts, cells = work.reshape(n_rows, n_heads, 5 * s + c), state.reshape(-1, n_heads, s, s)
    out = y.reshape(n_rows, n_heads, s)
    out[step.n_rows :] = 0.0
    for first, n, read, written, is_fresh in runs_of(step):
        m = np.zeros((n_heads, s, s)) if is_fresh else cells[read].astype(np.float64)
        for begin in range(first, first + n, c):
            rows = slice(begin, min(begin + c, first + n))
            chunk = parts[rows].swapaxes(0, 1).astype(np.float64)
            u, w, queries, keys = (chunk[:, :, i * s : (i + 1) * s] for i in range(4))
            n_chunk = chunk.shape[1]
            products = np.where(np.tri(n_chunk, dtype=bool), chunk[:, :, 5 * s : 5 * s + n_chunk], 0.0)
            x = u - w @ m
            out[rows] = (queries @ m + products @ x).swapaxes(0, 1)
            m = chunk[:, 0, 4 * s : 5 * s, None] * m + keys.swapaxes(1, 2) @ x
        cells[written] = m
