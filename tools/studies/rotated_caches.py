"""Measures whether a Hadamard rotation of K and V makes quantized caches more precise:
`python -m vkbackend.tools.studies.rotated_caches -m MODEL -f TEXT`.

Runs the model on the numpy device. Each stored head is quantized and dequantized, either as it is or rotated
(Ashkboos et al. 2024, arXiv:2404.00456) and then rotated back. The result is the same as with llama.cpp's
method, which rotates q, K and V and rotates attention's result back (for heads of 64 or more). A head of less
than 32 values is a block by itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vkbackend import env
from vkbackend.checks import whole_number
from vkbackend.formats import dequantize, quantize
from vkbackend.models.architectures.memory_specs import kv_of
from vkbackend.models.architectures.registry import load_model
from vkbackend.models.engine.runner.runner import Runner
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.options import Options
from vkbackend.models.perplexity import Score, perplexity, windows
from vkbackend.models.text.tokenizer import Tokenizer
from vkbackend.tools.measure.turns import exit_on_errors, table
from vkbackend.twins import attention, twin_of

TYPES = ("q8_0", "q5_1", "q5_0", "q4_1", "iq4_nl", "q4_0")
BLOCK = 32
Rounding = Callable[[np.ndarray], np.ndarray]


def hadamard(n: int) -> np.ndarray:
    """Return the orthonormal Hadamard matrix [n, n], which is its own inverse. `n` is a power of two
    (Sylvester)."""
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(n)


def rounding(dtype: str, head: int, n_rotated: int) -> Rounding:
    """Return a function that rounds rows [n, heads * head] to `dtype`, rotated in groups of `n_rotated`. A
    block of less than 32 values is filled with copies of its last value, which do not change its scale."""
    turn, size = hadamard(n_rotated), min(head, BLOCK)

    def rounded(rows: np.ndarray) -> np.ndarray:
        groups = rows.reshape(-1, n_rotated) @ turn
        blocks = np.pad(groups.reshape(-1, size), ((0, 0), (0, BLOCK - size)), "edge").astype(np.float32)
        values = dequantize(quantize(blocks, dtype).reshape(-1), dtype, blocks.shape)[:, :size]
        return np.asarray((values.reshape(-1, n_rotated) @ turn).reshape(rows.shape), np.float32)

    return rounded


def score_of(gguf: GGUF, cut: Sequence[Sequence[int]], rounded: Rounding | None) -> Score:
    """Score the windows with caches of F32, whose rows `rounded` changes before they are stored."""
    store = attention.kv_store

    def kv_store(x: np.ndarray, *args: Any, **how: Any) -> None:
        assert rounded and not how["norm"] and not how["n_rot"], how
        store(rounded(x), *args, **how)

    n = len(cut[0])
    options = Options.of(gguf.paths[0], devices=("numpy",), n_ctx=n, n_ubatch=n, type_k="f32", type_v="f32")
    runner = Runner(options, gguf)
    twin_of.cache_clear()
    try:
        if rounded:
            attention.kv_store = kv_store
        return perplexity(runner, cut)
    finally:
        attention.kv_store = store
        twin_of.cache_clear()
        runner.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("-m", "--model", required=True, metavar="FILE", help="all heads of the model have one size")
    add("-f", "--file", required=True, metavar="FILE", help="the text, UTF-8")
    add("-c", "--ctx-size", type=int, default=256, metavar="N", help="tokens of a window (default: 256)")
    add("--chunks", type=int, default=8, metavar="N", help="windows (default: 8)")
    args = parser.parse_args()
    os.environ[env.FUSE] = "0"  # stores contain no RoPE
    with exit_on_errors(), GGUF.open(args.model) as gguf:
        tokenizer = Tokenizer.from_gguf(gguf)
        tokens = tokenizer.encode(Path(args.file).read_text(encoding="utf-8"))
        bos = tokenizer.bos_id if tokenizer.add_bos else None
        cut = windows(tokens, whole_number("-c", args.ctx_size, 8, 4096), bos, args.chunks)
        spec = kv_of(load_model(gguf).kv(0))
        assert spec and spec.head_dim_k == spec.head_dim_v, spec
        exact = score_of(gguf, cut, None).ppl
        rows: list[list[object]] = []
        for dtype in TYPES:
            ratios = [
                score_of(gguf, cut, rounding(dtype, spec.head_dim_k, n)).ppl / exact
                for n in (1, spec.head_dim_k)
            ]
            rows.append([dtype, *(f"{ratio:.4f}" for ratio in ratios)])
        title = f"perplexity against F32 caches ({exact:.4f}), heads of {spec.head_dim_k}"
        table(title, ("K and V", "as they are", "rotated"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
