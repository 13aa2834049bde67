"""What all twins read their arguments with."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def f64(array: Array, *shape: int) -> Array:
    """The leading elements of `array` in float64 and in the shape the op means."""
    return array.reshape(-1)[: int(np.prod(shape))].reshape(shape).astype(np.float64)


def ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


def bf16_bits(values: Array) -> Array:
    """uint16 bits of float32 values as the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def bf16_values(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)
