from __future__ import annotations

import math

import numpy as np

from vkbackend.wire import F16_BLOCK, wire_words

Array = np.ndarray


def f64(array: Array, *shape: int) -> Array:
    return array.reshape(-1)[: math.prod(shape)].reshape(shape).astype(np.float64)


def ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


def bf16_bits(values: Array) -> Array:
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def bf16_values(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f16_blocks(words: Array, n: int) -> list[tuple[Array, slice]]:
    """Return (words [n_blocks, 1 + width / 2], slice of elements) of the complete blocks, then of a shorter
    last block."""
    whole = n // F16_BLOCK * F16_BLOCK
    blocks = []
    for first, last, width in ((0, whole, F16_BLOCK), (whole, n, n - whole)):
        if first < last:
            part = words[wire_words("f16", first) : wire_words("f16", last)]
            blocks.append((part.reshape(-1, 1 + ceil_div(width, 2)), slice(first, last)))
    return blocks


def put_f16(values: Array, words: Array) -> None:
    """Convert float32 [n] to the wire format f16 (`vkbackend.wire`), rounded to nearest even."""
    for blocks, at in f16_blocks(words, values.size):
        part = values[at].reshape(len(blocks), -1)
        tops = np.where(np.isfinite(part), np.abs(part), 0).max(axis=1)
        blocks[:, 0] = np.maximum(tops.view(np.uint32) & 0x7F800000, 1 << 23) - np.uint32(30 << 23)
        blocks[:, 1:] = 0
        blocks[:, 1:].view(np.uint16)[:, : part.shape[1]] = f16_bits(part, blocks[:, :1])


def f16_bits(values: Array, biases: Array) -> Array:
    """Return the 16-bit codes of float32 values, rounded in float64. `biases` holds the first word of each
    value's block."""
    tiny, nan, inf = np.finfo(np.float32).tiny, np.isnan(values), np.isinf(values)
    finite = np.where(nan | inf | (np.abs(values) < tiny), 0, values).astype(np.float64)
    share, exponent = np.frexp(np.abs(finite))  # 2048 * share is 0 or in [1024, 2048).
    at_top = (biases.view(np.int32) >> 23) + 30  # The exponent of the block's largest element.
    places = np.where(finite == 0, 0, exponent + 126 - at_top + 30)
    codes = np.where(places >= 1, np.rint(2048 * share) + 1024 * (places - 1), 0).astype(np.uint16)
    codes = np.where(nan, 0x7F00, np.where(inf, 0x7E00, codes))
    return (codes | np.signbit(values) * np.uint16(0x8000)).astype(np.uint16)


def take_f16(words: Array, out: Array) -> None:
    """Convert the words of `put_f16` to float32 [n]."""
    for blocks, at in f16_blocks(words, out.size):
        bits = out[at].reshape(len(blocks), -1).view(np.uint32)
        codes = blocks[:, 1:].view(np.uint16)[:, : bits.shape[1]]
        sizes = codes & np.uint16(0x7FFF)
        np.left_shift(sizes, 13, out=bits, dtype=np.uint32)
        bits += blocks[:, :1]
        bits *= sizes != 0
        if (special := sizes > 0x7C00).any():
            bits[special] = np.where(sizes[special] == 0x7E00, 0x7F800000, 0x7FC00000)
        bits |= (codes & np.uint16(0x8000)).astype(np.uint32) << 16
