"""Makes `golden/formats.npz`: random blocks of some formats with the elements that llama.cpp decodes, and
values with the blocks that llama.cpp stores in a KV cache.

    PYTHONPATH=tests/support python tests/support/oracles/make_formats.py

Needs xllamacpp.
"""

from __future__ import annotations

import ctypes

import numpy as np
from oracles import llama_cpp
from places import GOLDEN

from vkbackend.formats import block_of

FORMATS = "nvfp4", "q1_0", "q2_0"
STORED = "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"
N_BLOCKS = 64


def blocks(dtype: str) -> np.ndarray:
    """Return random blocks, uint8 [N_BLOCKS, bytes]. All scales of NVFP4 occur, and no F16 scale is
    NaN."""
    raw = np.random.default_rng(1).integers(0, 256, (N_BLOCKS, block_of(dtype)[1]), np.uint8)
    if dtype == "nvfp4":
        raw[:, :4] = np.arange(256).reshape(N_BLOCKS, 4)
    else:
        raw[:, 1] &= 0xBF  # clears the highest bit of the exponent
    return raw


def decoded(dtype: str, raw: np.ndarray) -> np.ndarray:
    """Return llama.cpp's elements of blocks, float32 [n]."""
    values = np.empty(len(raw) * block_of(dtype)[0], np.float32)
    decode = getattr(llama_cpp.library(), f"dequantize_row_{dtype}")
    decode(ctypes.c_void_p(raw.ctypes.data), ctypes.c_void_p(values.ctypes.data), ctypes.c_int64(len(values)))
    return values


def values() -> np.ndarray:
    """Return float32 [N_BLOCKS, 32]: magnitudes from below F16's subnormals to above its maximum, blocks of
    one magnitude, a constant block and zeros. A value of -127 makes a block's scale 1, so some integers and
    halves are in the middle between two codes."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((N_BLOCKS, 32)) * np.exp2(rng.uniform(-22, 16, (N_BLOCKS, 1)))
    x[:16] = np.exp2(rng.uniform(-27, 17, (16, 32))) * rng.choice([-1, 1], (16, 32))
    x[16:24] = rng.integers(-253, 253, (8, 32)) / 2
    x[16:24, :1] = -127
    x[24], x[25] = 3, 0
    return x.astype(np.float32)


def stored(dtype: str, x: np.ndarray) -> np.ndarray:
    """Return llama.cpp's blocks of rows x, uint8 [n, bytes]. llama.cpp's kernel for q8_0 on x86 rounds ties
    to even. The reference code, which is used here, rounds ties away from zero."""
    raw = np.empty((len(x), block_of(dtype)[1]), np.uint8)
    store = getattr(llama_cpp.library(), f"quantize_row_{dtype}_ref")
    store(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(raw.ctypes.data), ctypes.c_int64(x.size))
    return raw


def arrays() -> dict[str, np.ndarray]:
    by_name = {}
    for dtype in FORMATS:
        by_name[dtype] = blocks(dtype)
        by_name[f"{dtype} values"] = decoded(dtype, by_name[dtype])
    by_name["cached"] = values()
    return by_name | {f"{dtype} cached": stored(dtype, by_name["cached"]) for dtype in STORED}


if __name__ == "__main__":
    np.savez_compressed(GOLDEN / "formats.npz", **arrays())
