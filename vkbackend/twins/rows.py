from __future__ import annotations

from typing import Any

import numpy as np

from vkbackend.step import StepParams
from vkbackend.twins.arrays import (
    Array,
    bf16_bits,
    bf16_values,
    f64,
    put_f16,
    take_f16,
)
from vkbackend.twins.quantized import quantize_q8


def embed(
    w: Array,
    chosen: Array,
    y: Array,
    step: StepParams,
    *,
    n_embd: int,
    n_vocab: int,
    n_rows: int,
    ids: int,
    first: int = 0,
    **_: Any,
) -> None:
    """The dispatch with first=0 also writes zeros to rows whose ids are in other pieces of the table."""
    out = y.reshape(n_rows, n_embd)
    if first == 0:
        out[:] = 0.0
    n_ids = n_rows if ids == 4 else min(step.n_outputs if ids == 1 else step.n_rows, n_rows)
    named = step.rows[:, 2], step.outputs, step.rows[:, 0], step.types, chosen.reshape(-1)
    at = named[ids][:n_ids].astype(np.int64) - first
    known = np.flatnonzero((at >= 0) & (at < n_vocab))
    out[known] = w.reshape(n_vocab, n_embd)[at[known]]


def rms_norm(
    x: Array, w: Array, y: Array, *, n: int, n_rows: int, eps: float, has_w: int = 1, **_: Any
) -> None:
    rows = f64(x, n_rows, n)
    rows = rows / np.sqrt(np.mean(rows * rows, axis=1, keepdims=True) + eps)
    rows = rows * f64(w, n) if has_w else rows
    if y.dtype == np.uint8:
        quantize_q8(rows.astype(np.float32), y, k=n, n_rows=n_rows)
    else:
        y.reshape(n_rows, n)[:] = rows


def layer_norm(
    x: Array, w: Array, b: Array, y: Array, *, n: int, n_rows: int, eps: float, has_b: int = 1, **_: Any
) -> None:
    rows = f64(x, n_rows, n)
    rows = rows - rows.mean(axis=1, keepdims=True)
    rows = rows / np.sqrt(np.mean(rows * rows, axis=1, keepdims=True) + eps) * f64(w, n)
    y.reshape(n_rows, n)[:] = rows + f64(b, n) if has_b else rows


def center(x: Array, y: Array, *, n: int, n_rows: int, share: float, **_: Any) -> None:
    """`share` is 1 / n."""
    rows = f64(x, n_rows, n)
    y.reshape(n_rows, n)[:] = rows - share * rows.sum(axis=1, keepdims=True)


def row_moments(x: Array, y: Array, *, n: int, n_rows: int, **_: Any) -> None:
    rows = f64(x, n_rows, n)
    y.reshape(n_rows, 2)[:] = np.stack([rows.sum(axis=1), (rows * rows).sum(axis=1)], axis=1)


def gaussian_topk(
    x: Array, moments: Array, y: Array, *, n: int, width: int, n_rows: int, c: float, **_: Any
) -> None:
    mean, square = f64(moments, n_rows, 2).T / width
    least = mean + c * np.sqrt(np.maximum(square - mean * mean, 0))
    y.reshape(n_rows, n)[:] = np.maximum(f64(x, n_rows, n) - least[:, None], 0)


def pack_bf16(x: Array, y: Array, *, n: int, **_: Any) -> None:
    halves = y.reshape(-1).view(np.uint16)
    halves[:n] = bf16_bits(x.reshape(-1)[:n])
    halves[n:] = 0


def pack_halves(x: Array, y: Array, kept: Array, *, n: int, keeps: int, **_: Any) -> None:
    put_f16(x.reshape(-1)[:n], y.reshape(-1))
    if keeps:
        kept.reshape(-1)[:] = y.reshape(-1)


def _partial(slot: Array, own: Array | None, n: int, wire: int) -> Array:
    """Return n elements of a slot as float32. If `own` is given, it replaces the slot and is rounded in the
    same way."""
    if wire == 0:
        return slot.view(np.float32)[:n] if own is None else own.view(np.float32)[:n]
    if wire == 1:
        return bf16_values(slot.view(np.uint16)[:n] if own is None else bf16_bits(own.view(np.float32)[:n]))
    values = np.empty(n, np.float32)
    take_f16((slot if own is None else own).view(np.uint32), values)
    return values


def add_partials(
    residual: Array, own: Array, slots: Array, w: Array, h: Array, y: Array, *, n: int, n_rows: int,
    n_slots: int, own_index: int, slot_stride: int, writers: int, eps: float, has_residual: int = 1,
    has_norm: int = 1, wire: int = 0, **_: Any,
) -> None:  # fmt: skip
    """Compute in float32, because tests compare h bit by bit."""
    total = np.zeros(n_rows * n, np.float32)
    for s in range(n_slots):
        if writers >> s & 1:
            slot = slots.reshape(-1)[s * slot_stride :][:slot_stride]
            share = own.reshape(-1) if s == own_index else None
            total = total + _partial(slot, share, n_rows * n, wire)
    if has_residual:
        total = residual.reshape(-1)[: n_rows * n] + total
    h.reshape(-1)[: n_rows * n] = total
    if has_norm:
        rms_norm(total, w, y, n=n, n_rows=n_rows, eps=eps)


def top_k(
    x: Array, source: Array, ids: Array, values: Array, *, n: int, n_rows: int, chunk: int, n_chunks: int,
    k: int = 64, kind: int = 0, **_: Any,
) -> None:  # fmt: skip
    """`kind` is 1 if `source` holds ids, and 2 if `source` is a mask."""
    rows = np.asarray(x, np.float32).reshape(-1)[: n_rows * n].reshape(n_rows, n)
    table = source.reshape(-1).view(np.uint32)
    places, best = ids.reshape(-1), values.reshape(-1)
    for r in range(n_rows):
        words = table[r * -(-n // 32) :][: -(-n // 32)].view(np.uint8) if kind == 2 else None
        allowed = np.unpackbits(words, bitorder="little")[:n] if words is not None else np.ones(n, np.uint8)
        for c in range(n_chunks):
            at = np.flatnonzero(allowed[c * chunk : (c + 1) * chunk]) + c * chunk
            part = rows[r, at]
            ranks = np.where(np.isnan(part), np.inf, part).astype(np.float64)
            order = np.lexsort((at, -ranks, ~np.isnan(part)))[:k]
            out = (r * n_chunks + c) * k
            places[out : out + k], best[out : out + k] = 0xFFFFFFFF, -np.inf
            chosen = at[order]
            places[out : out + len(order)] = table[r * n + chosen] if kind == 1 else chosen
            best[out : out + len(order)] = part[order]


def log_sum_exp(
    x: Array, y: Array, *, n: int, n_rows: int, chunk: int, n_chunks: int, **_: Any
) -> None:  # fmt: skip
    rows = np.asarray(x, np.float64).reshape(-1)[: n_rows * n].reshape(n_rows, n)
    out = y.reshape(-1)[: n_rows * n_chunks * 2].reshape(n_rows, n_chunks, 2)
    for c in range(n_chunks):
        part = rows[:, c * chunk : (c + 1) * chunk]
        peak = np.fmax.reduce(part, axis=1, initial=-np.inf)
        with np.errstate(invalid="ignore"):
            out[:, c, 0] = peak
            out[:, c, 1] = np.exp(part - np.where(peak == -np.inf, 0, peak)[:, None]).sum(axis=1)
