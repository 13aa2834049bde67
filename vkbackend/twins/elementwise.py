from __future__ import annotations

import math
from typing import Any

import numpy as np

from vkbackend.twins.arrays import Array, f64

erfc = np.vectorize(math.erfc, otypes=[np.float64])


def glu(gate: Array, up: Array, y: Array, *, n: int, act: int = 1, **_: Any) -> None:
    g, u = f64(gate, n), f64(up, n)

    def sigmoid(x: Array) -> Array:
        return 1.0 / (1.0 + np.exp(np.minimum(-x, 700.0)))

    capped = np.minimum(g, 7.0)
    product = [
        lambda: g * u,
        lambda: g * sigmoid(g) * u,
        lambda: 0.5 * g * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (g + 0.044715 * g**3))) * u,
        lambda: sigmoid(g) * u,
        lambda: capped * sigmoid(1.702 * capped) * (np.clip(u, -7.0, 7.0) + 1.0),
        lambda: 0.5 * g * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (g + 0.044715 * g**3))),
        lambda: np.maximum(g, 0.0) ** 2,
        lambda: g * sigmoid(g),
        lambda: g * 0.5 * erfc(-g / math.sqrt(2.0)),
        lambda: g * sigmoid(1.702 * g),
        lambda: np.maximum(g, 0.0) * u,
        lambda: sigmoid(g),
    ]
    y.reshape(-1)[:n] = product[act]()


def scale(x: Array, y: Array, *, n: int, c: float, **_: Any) -> None:
    """Compute in float32, because a single product is rounded only once."""
    y.reshape(-1)[:n] = np.float32(c) * x.reshape(-1)[:n] if c else 0.0


def softcap(x: Array, y: Array, *, n: int, c: float, **_: Any) -> None:
    y.reshape(-1)[:n] = c * np.tanh(f64(x, n) / c)


def xielu(
    x: Array, y: Array, *, n: int, alpha_p: float, alpha_n: float, beta: float, eps: float, **_: Any
) -> None:
    values = f64(x, n)
    bent = alpha_n * (np.expm1(np.minimum(values, eps)) - values)
    y.reshape(-1)[:n] = np.where(values > 0, alpha_p * values * values, bent) + beta * values


def add(a: Array, b: Array, y: Array, *, n: int, **_: Any) -> None:
    y.reshape(-1)[:n] = f64(a, n) + f64(b, n)


def add_bias(x: Array, b: Array, y: Array, *, n: int, n_rows: int, **_: Any) -> None:
    y.reshape(-1)[: n_rows * n] = (f64(x, n_rows, n) + f64(b, n)).reshape(-1)


def clamp(x: Array, y: Array, *, n: int, low: float, high: float, **_: Any) -> None:
    y.reshape(-1)[:n] = np.clip(x.reshape(-1)[:n], np.float32(low), np.float32(high))


def mul_vector(x: Array, v: Array, y: Array, *, n: int, n_rows: int, **_: Any) -> None:
    y.reshape(-1)[: n_rows * n] = (f64(x, n_rows, n) * f64(v, n)).reshape(-1)


def pool_rows(x: Array, y: Array, *, n: int, n_rows: int, count: int, **_: Any) -> None:
    y.reshape(-1)[: n_rows * n] = f64(x, n_rows, count, n).mean(axis=1).reshape(-1)


def gate_rows(gate: Array, x: Array, y: Array, *, n: int, n_rows: int, softplus: int = 0, **_: Any) -> None:
    g = f64(gate, n_rows, 1)
    factor = np.logaddexp(0, g) if softplus else 1 / (1 + np.exp(-g))
    y.reshape(-1)[: n_rows * n] = (factor * f64(x, n_rows, n)).reshape(-1)


def columns(x: Array, y: Array, *, n: int, width: int, first: int, n_rows: int, **_: Any) -> None:
    rows = x.reshape(-1)[: n_rows * width].reshape(n_rows, width)
    y.reshape(-1)[: n_rows * n] = rows[:, first : first + n].reshape(-1)


def copy_words(src: Array, dst: Array, *, n: int, **_: Any) -> None:
    dst.reshape(-1).view(np.uint32)[:n] = src.reshape(-1).view(np.uint32)[:n]
