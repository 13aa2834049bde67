"""Number formats that shaders read.

Quantized blocks have GGML's layouts, such as `block_q4_0`. `q8` and `f16s` are vkbackend's formats for
activations (shaders/lib/q8.glsl, half_rows.glsl).
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

_PLAIN = {"f32": 4, "u32": 4, "f16": 2, "bf16": 2, "u8": 1}
NEWER = {42: ("q2_0", 64, 18)}  # GGUF's types that the package `gguf` lacks: id -> (name, elements, bytes)
_AT_ONCE = 1 << 16  # elements that `dequantize` converts at once; their intermediate arrays fit a cache


@cache
def block_of(dtype: str) -> tuple[int, int]:
    """Return the elements and bytes of a block. Raises KeyError for a format that GGML lacks."""
    if dtype in _PLAIN:
        return 1, _PLAIN[dtype]
    if dtype == "q8":
        return 32, 40
    for name, elements, nbytes in NEWER.values():
        if name == dtype:
            return elements, nbytes
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    elements, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[dtype.upper()]]
    return elements, nbytes


def row_nbytes(dtype: str, width: int) -> int:
    if dtype == "f16s":
        return -(-width // 32) * 64 + 16
    elements, nbytes = block_of(dtype)
    assert width % elements == 0, f"{width} elements are not whole {dtype} blocks of {elements}"
    return width // elements * nbytes


def padded(width: int, dtype: str) -> int:
    """Return the number of elements of the fewest blocks that hold `width` elements."""
    block = block_of(dtype)[0]
    return -(-width // block) * block


def quantize(values: np.ndarray, dtype: str) -> np.ndarray:
    """Quantize float32 [rows, width] to uint8 [rows, bytes of a row], rounded like ggml's reference code."""
    if dtype == "iq4_nl":
        return _iq4_nl(np.ascontiguousarray(values, np.float32).reshape(-1, 32)).reshape(len(values), -1)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize as gguf_quantize

    with np.errstate(over="ignore"):  # scales above 65,504 become inf
        return np.asarray(gguf_quantize(np.ascontiguousarray(values), GGMLQuantizationType[dtype.upper()]))


def _iq4_nl(blocks: np.ndarray) -> np.ndarray:
    """Quantize float32 [n, 32] to blocks of IQ4_NL, uint8 [n, 18], with the sums in ggml's order. The scale d
    is not fitted if a sum could overflow or lose bits, because then d is 0 or inf in F16 anyway."""
    from gguf.quants import IQ4_NL

    levels = np.array(IQ4_NL.kvalues, np.float32)
    top = np.take_along_axis(blocks, abs(blocks).argmax(1, keepdims=True), 1)
    is_zero = abs(top) < np.float32(1e-29)
    d = np.where(is_zero, np.float32(0), top / levels[0])  # not -0
    inverse = np.where(is_zero, np.float32(0), np.float32(1) / np.where(is_zero, np.float32(1), d))
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, blocks * inverse, side="right")
    v, sums = levels[codes], np.zeros((2, len(blocks)), np.float32)
    is_fitted = (abs(top) > np.float32(1e-11)) & (abs(top) < np.float32(1e11))
    x = np.where(is_fitted, blocks, np.float32(1))
    for i in range(32):
        weighted = x[:, i] * x[:, i] * v[:, i]
        sums += weighted * x[:, i], weighted * v[:, i]
    d = np.where(is_fitted, (sums[0] / sums[1])[:, None], d)
    with np.errstate(over="ignore"):
        halves = d.astype(np.float16).view(np.uint8)
    return np.concatenate([halves, codes[:, :16] | codes[:, 16:] << 4], 1, dtype=np.uint8, casting="unsafe")


def dequantize(raw: np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Convert stored bytes to float32 of `shape`. Padding after the last row is ignored."""
    raw = raw[: math.prod(shape[:-1]) * row_nbytes(dtype, shape[-1])]
    if dtype == "f32":
        return raw.view(np.float32).reshape(shape)
    if dtype == "f16":
        return raw.view(np.float16).astype(np.float32).reshape(shape)
    if dtype == "u32":
        return raw.view(np.uint32).reshape(shape)
    if dtype == "f16s":
        rows, end = raw.reshape(-1, row_nbytes(dtype, shape[-1])), -(-shape[-1] // 32) * 64
        halves, scales = rows[:, : 2 * shape[-1]].view(np.float16), rows[:, end : end + 4].view(np.float32)
        return (halves.astype(np.float32) * scales).reshape(shape)
    if dtype == "q8":
        rows = raw.reshape(-1, row_nbytes(dtype, shape[-1]))
        codes, blocks = rows[:, : shape[-1]].view(np.int8), rows[:, shape[-1] :].view(np.float32)
        return (codes * np.repeat(blocks[:, ::2], 32, axis=1)).reshape(shape)
    if dtype in ("q1_0", "q2_0"):
        return _low_bits(raw.reshape(-1, 18), 1 if dtype == "q1_0" else 2).reshape(shape)
    from gguf import quants

    kind = getattr(quants, dtype.upper())
    kind.init_grid()
    rows, step = raw.reshape(-1, row_nbytes(dtype, shape[-1])), max(1, _AT_ONCE // shape[-1])
    values = np.empty((len(rows), shape[-1]), np.float32)
    for at in range(0, len(rows), step):  # `quants.dequantize` converts 16 rows at once, in up to 6x the time
        values[at : at + step] = kind.dequantize_rows(rows[at : at + step])
    return values.reshape(shape)


def _low_bits(blocks: np.ndarray, n_bits: int) -> np.ndarray:
    """Convert blocks of Q1_0 or Q2_0, uint8 [n, 18], to float32 [n, 128 / n_bits]."""
    d = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    codes = (blocks[:, 2:, None] >> np.arange(0, 8, n_bits, dtype=np.uint8)) & (2**n_bits - 1)
    values = codes.reshape(len(blocks), -1).astype(np.float32)
    return d * (2 * values - 1 if n_bits == 1 else values - 1)


def widened(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Convert the bytes of f32, f16 or bf16 elements to f32."""
    if dtype == "f32":
        return raw
    halves = np.ascontiguousarray(raw).reshape(-1).view(np.uint16)
    if dtype == "bf16":
        return (halves.astype(np.uint32) << 16).view(np.uint8)
    return halves.view(np.float16).astype(np.float32).view(np.uint8)


def narrowed(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Convert f32 bytes to f32, f16 or bf16 elements, the exact inverse of `widened`."""
    if dtype == "f32":
        return raw
    words = np.ascontiguousarray(raw).reshape(-1).view(np.uint32)
    if dtype == "bf16":
        return (words >> 16).astype(np.uint16).view(np.uint8)
    return words.view(np.float32).astype(np.float16).view(np.uint8)
