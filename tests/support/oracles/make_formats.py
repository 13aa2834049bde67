"""Makes `golden/formats.npz`: random blocks of some formats, and the elements that llama.cpp decodes.

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


def arrays() -> dict[str, np.ndarray]:
    by_name = {}
    for dtype in FORMATS:
        by_name[dtype] = blocks(dtype)
        by_name[f"{dtype} values"] = decoded(dtype, by_name[dtype])
    return by_name


if __name__ == "__main__":
    np.savez_compressed(GOLDEN / "formats.npz", **arrays())
