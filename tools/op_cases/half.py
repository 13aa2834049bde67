from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vkbackend import ops
from vkbackend.formats import block_of
from vkbackend.tools.op_cases.matrix import MatMul, row_scales
from vkbackend.tools.op_cases.setup import Case, Setup, Tensor


@dataclass(frozen=True)
class PackF16(Case):
    """Values have all magnitudes, but none is subnormal, because drivers may flush subnormal floats to 0.
    `special` adds zeros, NaN, inf, extremes and ties."""

    tolerance: ClassVar[float] = 0.0
    k: int = 64
    rows: int = 1
    special: bool = False

    def setup(self, rng: np.random.Generator) -> Setup:
        x = rng.uniform(-1, 1, (self.rows, self.k)).astype(np.float32)
        x *= np.exp2(rng.integers(-80, 100, (self.rows, 1))).astype(np.float32)
        x *= np.exp2(rng.integers(-30, 1, x.shape)).astype(np.float32)  # some underflow F16
        if self.special:
            x[0], x[1, 5], x[2] = 0, np.nan, rng.uniform(-1e6, 1e6, self.k)
            x[2, 7], x[3], x[4] = -np.inf, 3.4e38, 2e-38
            x[5] = 1 + np.exp2(-11) * np.arange(self.k)  # ties
        tensors = {"x": Tensor(x.shape, "f32", x), "y": Tensor(x.shape, "f16s", written=True)}
        return Setup(tensors, lambda r, v: r.pack_f16(v["x"], v["y"]))


@dataclass(frozen=True)
class MatMulCoop(MatMul):
    op = ops.MATRIX_OPS["mat_mul_coop"]
    tolerance = 1e-6

    def parts(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        return {name: array.reshape(self.rows, -1) / row_scales(self.rows)}  # weighs rows equally


def quick() -> list[Case]:
    return [
        PackF16(1),
        PackF16(67, 9, special=True),
        PackF16(2048, 2),
        MatMulCoop("f32", 1, 1, 1),
        MatMulCoop("f16", 67, 35, 33, pad=3, bias=True, span=1e6),
        MatMulCoop("q8_0", 129, 96, 65, nan=True),
        MatMulCoop("f16", 66, 128, 33, bias=True),  # wide reads of w
        MatMulCoop("bf16", 2, 64, 9),
        MatMulCoop("f32", 130, 192, 17),
        MatMulCoop("q4_k", 64, 256, 20),
    ]


def wide(kind: str) -> list[Case]:
    block = block_of(kind)[0]
    k = 288 if 288 % block == 0 else 3 * block
    return [
        *(MatMulCoop(kind, n, k, rows, bias=True) for n in (63, 65) for rows in (15, 16, 17, 31, 33)),
        MatMulCoop(kind, 1, k, 1, nan=True),
        MatMulCoop(kind, 64, 4096, 128, span=1e-6),
        MatMulCoop(kind, 4097, k, 65),  # tiles of 64 x 96
        MatMulCoop(kind, 8193, k, 97),  # tiles of 128 x 128
    ]


def some_of_gpus(kind: str, k: int) -> list[Case]:
    return [MatMulCoop(kind, 3, k)]


def bench(kind: str) -> list[Case]:
    return [MatMulCoop(kind, 3072, 1024, rows) for rows in (16, 128, 512)]
