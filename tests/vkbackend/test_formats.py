"""The block sizes are as in GGUF, and dequantization inverts the quantizers of the package `gguf`."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from oracles import make_formats
from places import GOLDEN

from vkbackend import codebooks, shaderlib
from vkbackend.buffer import Buffer, Home, View
from vkbackend.formats import block_of, dequantize, quantize, row_nbytes
from vkbackend.tools.op_cases.setup import weights

pytestmark = pytest.mark.no_vulkan


# (elements, bytes) per block, from GGML's struct definitions
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


GOLDEN_BLOCKS = np.load(GOLDEN / "formats.npz")


@pytest.mark.parametrize("dtype", make_formats.FORMATS)
def test_blocks_decode_as_in_llama_cpp(dtype: str) -> None:
    raw, want = GOLDEN_BLOCKS[dtype], GOLDEN_BLOCKS[f"{dtype} values"]
    values = dequantize(raw.reshape(-1), dtype, (len(raw), len(want) // len(raw)))
    np.testing.assert_array_equal(values.reshape(-1).view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("dtype", make_formats.STORED)
def test_caches_store_the_bytes_of_llama_cpp(dtype: str) -> None:
    """The op cases of kv_store compare the shader's bytes with `quantize`. llama.cpp leaves the codes of a
    block of zeros undefined in IQ4_NL."""
    got, want = quantize(GOLDEN_BLOCKS["cached"], dtype), GOLDEN_BLOCKS[f"{dtype} cached"]
    defined = np.any(GOLDEN_BLOCKS["cached"], axis=1) | (dtype != "iq4_nl")
    np.testing.assert_array_equal(got[defined], want[defined])


@pytest.mark.oracle
def test_llama_cpp_decodes_the_golden_blocks() -> None:
    for name, values in make_formats.arrays().items():
        np.testing.assert_array_equal(values, GOLDEN_BLOCKS[name])


@pytest.mark.parametrize("dtype", shaderlib.weight_types())
@pytest.mark.parametrize("padding", [0, 2, 5])
def test_dequantize_ignores_padding(dtype: str, padding: int) -> None:
    width = 3 * max(32, block_of(dtype)[0])
    raw = weights(np.random.default_rng(1), dtype, 3, width).raw
    assert raw is not None
    stored = raw.reshape(3, -1)
    if dtype not in ("f32", "f16"):
        stored = stored.view(np.uint8)
    if dtype in ("q1_0", "q2_0"):
        want = dequantize(raw.reshape(-1).view(np.uint8), dtype, (3, width))
    else:
        want = gguf_dequantize(stored, GGMLQuantizationType[dtype.upper()])
    padded = np.concatenate([raw.reshape(-1).view(np.uint8), np.full(padding, 0xFF, np.uint8)])
    np.testing.assert_array_equal(dequantize(padded, dtype, (3, width)), want)


@pytest.mark.parametrize("dtype", codebooks.FORMATS)
def test_codebook_entries_equal_the_grid(dtype: str) -> None:
    name = codebooks.codebook_of("mat_vec", dtype)
    assert name == ("iq1_s" if dtype == "iq1_m" else dtype)
    kind = getattr(quants, dtype.upper())
    kind.init_grid()
    n = kind.grid_shape[1]
    codes = (codebooks.entries(name)[:, None] >> np.arange(0, 16, 16 // n)) & (1 << 16 // n) - 1
    np.testing.assert_array_equal(np.array(kind.grid_map)[codes], kind.grid.reshape(kind.grid_shape))


def test_formats_without_a_codebook() -> None:
    assert [t for t in shaderlib.weight_types() if codebooks.codebook_of("embed", t)] == sorted(
        codebooks.FORMATS, key=shaderlib.weight_types().index
    )
    assert codebooks.codebook_of("add", "f32") is None


def test_views_round_up_to_words() -> None:
    buffer = Buffer(64, Home.WEIGHTS, "w")
    assert View(buffer, 0, (32,), "q4_0").nbytes == 20
    assert View(buffer, 4, (3,), "f16").end == 12
    assert View(buffer, 0, (0, 8)).nbytes == 0
    assert View(buffer, 0, (4, 4)).rows(1, 3) == View(buffer, 16, (2, 4))
    with pytest.raises(AssertionError, match="multiple of 4"):
        View(buffer, 2, (1,))
    with pytest.raises(AssertionError, match="exceeds"):
        View(buffer, 4, (4, 4))


def test_a_block_of_zeros_in_iq4_nl_has_the_scale_0() -> None:
    """As in llama.cpp, the scale is not -0. Code 8 means the smallest positive value."""
    assert quantize(np.zeros((1, 32), np.float32), "iq4_nl").tolist() == [[0, 0, *[0x88] * 16]]
