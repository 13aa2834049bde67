from __future__ import annotations

from typing import Any

import numpy as np

from vkbackend.twins.arrays import Array, f64


def streams_of(
    x: Array, a: Array, y: Array, *, n: int, n_streams: int, n_rows: int, least: float, **_: Any
) -> None:
    first, rest = f64(x, n_rows, 1, n), f64(a, n_rows, n_streams - 1, n)
    wanted, squares = ((v * v).mean(axis=2, keepdims=True) for v in (first, rest))
    scaled = rest * np.sqrt(wanted / np.maximum(squares, least))
    y.reshape(n_rows, n_streams, n)[:] = np.concatenate([first, scaled], axis=1)


def streams_predict(
    x: Array, routed: Array, w: Array, y: Array, *, n: int, n_rows: int, scale: float, streams: int, **_: Any
) -> None:
    values, modes = f64(x, n_rows, streams, n), np.tanh(scale * f64(routed, n_rows, streams))
    between = np.eye(streams) + (modes @ f64(w, streams**2, streams).T).reshape(n_rows, streams, streams)
    y.reshape(n_rows, streams, n)[:] = between @ values


def streams_correct(
    x: Array, a: Array, routed: Array, w: Array, g: Array, y: Array, z: Array,
    *, n: int, n_rows: int, scale: float, streams: int, **_: Any,
) -> None:  # fmt: skip
    values, modes = f64(x, n_rows, streams, n), np.tanh(scale * f64(routed, n_rows, streams))
    gains = 1 + modes @ f64(w, streams, streams).T
    corrected = values + gains[:, :, None] * (f64(a, n_rows, 1, n) - values[:, :1])
    y.reshape(n_rows, streams, n)[:] = corrected
    z.reshape(n_rows, n)[:] = corrected[:, 0] * f64(g, n)


def streams_add(x: Array, a: Array, y: Array, *, n: int, n_streams: int, n_rows: int, **_: Any) -> None:
    values = f64(x, n_rows, n_streams, n)
    values[:, 1:] += f64(a, n_rows, 1, n)
    y.reshape(n_rows, n_streams, n)[:] = values


def _weights(mixes: Array, scale: Array, base: Array, part: int, m: int) -> Array:
    first = part * m
    values = scale.reshape(-1)[part] * mixes[:, first : first + m] + f64(base, first + m)[first:]
    return 1 / (1 + np.exp(np.minimum(-values, 700.0)))


def streams_mix(
    x: Array, mixes: Array, scale: Array, base: Array, y: Array,
    *, n: int, n_rows: int, width: int, eps: float, streams: int, **_: Any,
) -> None:  # fmt: skip
    weights = _weights(f64(mixes, n_rows, width), scale, base, 0, streams) + eps
    y.reshape(n_rows, n)[:] = np.einsum("rm,rmn->rn", weights, f64(x, n_rows, streams, n))


def streams_spread(
    x: Array, a: Array, mixes: Array, scale: Array, base: Array, y: Array,
    *, n: int, n_rows: int, gain: float, eps: float, streams: int, **_: Any,
) -> None:  # fmt: skip
    weights = gain * _weights(f64(mixes, n_rows, 2 * streams), scale, base, 1, streams) + eps
    values = f64(x, n_rows, streams, n) + weights[:, :, None] * f64(a, n_rows, 1, n)
    y.reshape(n_rows, streams, n)[:] = values


def streams_sinkhorn(
    x: Array, a: Array, mixes: Array, scale: Array, base: Array, y: Array,
    *, n: int, n_rows: int, n_turns: int, eps: float, streams: int, **_: Any,
) -> None:  # fmt: skip
    m, raw, bases = streams, f64(mixes, n_rows, (2 + streams) * streams), f64(base, (2 + streams) * streams)
    logits = (scale.reshape(-1)[2] * raw[:, 2 * m :] + bases[2 * m :]).reshape(n_rows, m, m)
    weights = np.exp(logits - logits.max(axis=2, keepdims=True))
    weights = weights / weights.sum(axis=2, keepdims=True) + eps
    for axis in (1, *(2, 1) * (n_turns - 1)):
        weights = weights / (weights.sum(axis=axis, keepdims=True) + eps)
    gains = 2 * _weights(raw, scale, base, 1, m)
    values = np.einsum("rji,rjn->rin", weights, f64(x, n_rows, m, n))
    y.reshape(n_rows, m, n)[:] = values + gains[:, :, None] * f64(a, n_rows, 1, n)


def streams_gate(
    x: Array, k: Array, a: Array, y: Array, *, n: int, n_rows: int, n_streams: int, **_: Any
) -> None:
    shape = n_rows, n_streams, n
    score = (f64(x, *shape) * f64(k, *shape)).sum(axis=2, keepdims=True) / np.sqrt(n)
    root = np.sign(score) * np.sqrt(np.maximum(np.abs(score), 1e-6))
    y.reshape(shape)[:] = f64(a, n_rows, 1, n) / (1 + np.exp(np.minimum(-root, 700.0)))


def ngram_ids(
    x: Array, table: Array, ids: Array, *, n_rows: int, n_heads: int, end: int, longest: int, **_: Any
) -> None:
    words = table.reshape(-1).astype(np.uint64)
    factors = words[: 2 * longest : 2] | words[1 : 2 * longest : 2] << np.uint64(32)
    sizes, offsets = words[2 * longest :].reshape(2, n_heads)
    tokens = np.nan_to_num(x.reshape(n_rows, longest)).astype(np.int64) + end
    ended = np.cumsum(np.c_[np.zeros(n_rows, bool), tokens[:, 1:] == end], axis=1) > 0
    products = np.where(ended, end, tokens).astype(np.uint64) * factors
    hashes = np.bitwise_xor.accumulate(products, axis=1)[:, 1:]
    of_heads = np.repeat(hashes, n_heads // (longest - 1), axis=1)
    ids.reshape(n_rows, n_heads)[:] = (of_heads % sizes + offsets).astype(np.uint32)


def streams_attend(
    x: Array, a: Array, w: Array, y: Array, *, n: int, n_rows: int, eps: float, streams: int, **_: Any
) -> None:
    values = np.concatenate([f64(x, n_rows, streams, n), f64(a, n_rows, 1, n)], axis=1)
    scores = values @ f64(w, n) / np.sqrt((values * values).mean(axis=2) + eps)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    y.reshape(n_rows, n)[:] = np.einsum("rm,rmn->rn", weights, values)
