from __future__ import annotations

from typing import Any

import numpy as np

from vkbackend.step import StepParams
from vkbackend.twins.arrays import Array, f64
from vkbackend.twins.recurrent import runs_of


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(np.minimum(-x, 700.0)))


def token_shift(
    x: Array, mu: Array, state: Array, y: Array, step: StepParams, *, width: int, n_rows: int, mixes: int,
    row_states: int = 0, **_: Any,
) -> None:  # fmt: skip
    rows, out, cells = f64(x, n_rows, width), y.reshape(mixes, n_rows, width), state.reshape(-1, width)
    factors = f64(mu, mixes, 1, width)
    for first, n, read, written, is_fresh in runs_of(step):
        own = rows[first : first + n]
        before = np.concatenate([np.zeros((1, width)) if is_fresh else cells[read][None], own[:-1]])
        out[:, first : first + n] = own + factors * (before - own)
        cells[written] = own[-1]
        for t in range(n) if row_states else ():
            cells[step.cells_after[first + t]] = own[t]


def wkv_keys(
    k: Array, rate: Array, removal: Array, replacement: Array, key: Array, removed: Array, added: Array,
    *, size: int, n_heads: int, n_rows: int, **_: Any,
) -> None:  # fmt: skip
    shape = n_rows, n_heads, size
    keys, rates = f64(k, *shape), _sigmoid(f64(rate, *shape))
    scaled = keys * f64(removal, n_heads, size)
    unit = scaled / np.maximum(np.sqrt((scaled * scaled).sum(axis=2, keepdims=True)), 1e-12)
    key.reshape(shape)[:] = keys * (1.0 + (rates - 1.0) * f64(replacement, n_heads, size))
    removed.reshape(shape)[:] = unit
    added.reshape(shape)[:] = unit * rates


def wkv(
    r: Array, decay: Array, key: Array, v: Array, removed: Array, added: Array, state: Array, y: Array,
    step: StepParams, *, n_heads: int, n_rows: int, s: int, row_states: int = 0, **_: Any,
) -> None:  # fmt: skip
    shape = n_rows, n_heads, s
    reads, keys, values, old, new = (f64(a, *shape) for a in (r, key, v, removed, added))
    slow, out, cells = f64(decay, *shape), y.reshape(shape), state.reshape(-1, n_heads, s, s)
    out[step.n_rows :] = 0.0
    for first, n, read, written, is_fresh in runs_of(step):
        m = np.zeros((n_heads, s, s)) if is_fresh else cells[read].astype(np.float64)
        for t in range(first, first + n):
            kept = np.exp(-0.606531 * _sigmoid(slow[t]))[:, :, None] * m
            known = np.einsum("hij,hi->hj", m, old[t])
            m = kept - new[t][:, :, None] * known[:, None] + keys[t][:, :, None] * values[t][:, None]
            out[t] = np.einsum("hij,hi->hj", m, reads[t])
            if row_states:
                cells[step.cells_after[t]] = m
        cells[written] = m


def wkv_norm(
    x: Array, r: Array, key: Array, v: Array, bonus: Array, w: Array, b: Array, y: Array,
    *, size: int, n_heads: int, n_rows: int, eps: float, **_: Any,
) -> None:  # fmt: skip
    shape = n_rows, n_heads, size
    values = f64(x, *shape)
    own = (f64(r, *shape) * f64(key, *shape) * f64(bonus, n_heads, size)).sum(axis=2, keepdims=True)
    centred = values - values.mean(axis=2, keepdims=True)
    normed = centred / np.sqrt((centred * centred).mean(axis=2, keepdims=True) + eps)
    out = normed * f64(w, n_heads, size) + f64(b, n_heads, size) + own * f64(v, *shape)
    y.reshape(shape)[:] = out
