"""Element and block formats: sizes as GGUF stores them, and the oracle against `gguf`'s own quantizers."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize

from vkbackend.buffer import Buffer, Home, View
from vkbackend.formats import block_of, dequantize, row_nbytes

# (elements, bytes) per block, from the GGML struct definitions: scale f16 plus quants
BLOCKS = {"f32": (1, 4), "u32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "u8": (1, 1), "q8_0": (32, 34),
          "q4_0": (32, 18), "q6_k": (256, 210)}  # fmt: skip


@pytest.mark.parametrize("dtype", BLOCKS)
def test_block_sizes(dtype: str) -> None:
    elements, nbytes = BLOCKS[dtype]
    assert block_of(dtype) == (elements, nbytes)
    assert row_nbytes(dtype, 3 * elements) == 3 * nbytes


def test_unknown_and_broken_rows_are_refused() -> None:
    with pytest.raises(KeyError):
        block_of("q9_9")
    with pytest.raises(AssertionError, match="whole q8_0 blocks"):
        row_nbytes("q8_0", 33)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "f16", "f32"])
@pytest.mark.parametrize("padding", [0, 2, 5])
def test_dequantize_ignores_padding(dtype: str, padding: int) -> None:
    kind = GGMLQuantizationType[dtype.upper()]
    raw = quantize(np.random.default_rng(1).normal(size=(3, 96)).astype(np.float32), kind)
    want = gguf_dequantize(raw, kind)
    padded = np.concatenate([raw.reshape(-1).view(np.uint8), np.full(padding, 0xFF, np.uint8)])
    np.testing.assert_array_equal(dequantize(padded, dtype, (3, 96)), want)


def test_views_round_up_to_words() -> None:
    buffer = Buffer(64, Home.WEIGHTS, "w")
    assert View(buffer, 0, (32,), "q4_0").nbytes == 20  # 18 bytes of block
    assert View(buffer, 4, (3,), "f16").end == 12
    assert View(buffer, 0, (0, 8)).nbytes == 0
    assert View(buffer, 0, (4, 4)).rows(1, 3) == View(buffer, 16, (2, 4))
    with pytest.raises(AssertionError, match="multiple of 4"):
        View(buffer, 2, (1,))
    with pytest.raises(AssertionError, match="exceeds"):
        View(buffer, 4, (4, 4))
