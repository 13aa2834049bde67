from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from vkbackend import ops, shaderlib
from vkbackend.formats import block_of
from vkbackend.tools.op_cases.matrix import MatVec
from vkbackend.tools.op_cases.moe import MatVecId
from vkbackend.tools.op_cases.setup import Case, Setup, Tensor

TYPES = tuple(shaderlib.manifest()["mat_dot"])
UNIT_TYPES = shaderlib.types_of("mat_mul_dot_coop")


@dataclass(frozen=True)
class QuantizeQ8(Case):
    """Blocks are of all magnitudes. `special` adds zeros, NaN, inf, extremes, ties and subnormal numbers."""

    tolerance: ClassVar[float] = 0.0
    k: int = 64
    rows: int = 1
    special: bool = False

    def setup(self, rng: np.random.Generator) -> Setup:
        x = rng.uniform(-1, 1, (self.rows, self.k)).astype(np.float32)
        blocks = x.reshape(-1, 32)
        blocks *= np.exp2(rng.integers(-30, 30, (len(blocks), 1))).astype(np.float32)
        if self.special:
            blocks[0], blocks[1, 5], blocks[2, 31] = 0, np.nan, -np.inf
            for i, largest in ((3, 3e38), (4, 1e-36)):
                blocks[i] = rng.uniform(-1, 1, 32) * largest
            blocks[5], blocks[5, 0] = 0.5, 127  # Ties.
            blocks[6], blocks[6, 7] = 1e-41, -1e-3  # Subnormal numbers.
        tensors = {
            "x": Tensor(x.shape, "f32", x),
            "y": Tensor(x.shape, "q8", written=True),
        }
        return Setup(tensors, lambda r, v: r.quantize_q8(v["x"], v["y"]))


@dataclass(frozen=True)
class MatDot(MatVec):
    op = ops.MATRIX_OPS["mat_dot"]
    type: str = "q8_0"


@dataclass(frozen=True)
class MatMulDot(MatDot):
    op = ops.MATRIX_OPS["mat_mul_dot"]
    rows: int = 9


@dataclass(frozen=True)
class MatMulDotCoop(MatMulDot):
    op = ops.MATRIX_OPS["mat_mul_dot_coop"]


@dataclass(frozen=True)
class MatDotId(MatVecId):
    op = ops.EXPERTS_OPS["mat_dot_id"]
    type: str = "q8_0"


@dataclass(frozen=True)
class MatMulDotId(MatDotId):
    op = ops.EXPERTS_OPS["mat_mul_dot_id"]
    tile: int = 16


def quick() -> list[Case]:
    down: dict[str, Any] = {"axis": ops.COLUMNS, "x_per_used": True}
    return [
        QuantizeQ8(32),
        QuantizeQ8(96, 7),
        QuantizeQ8(256, 1, special=True),
        QuantizeQ8(2048, 3),
        MatDot("q8_0", 33, 32),
        MatDot("q4_0", 129, 576, 8, bias=True),
        MatDot("q4_k", 17, 768, 3, pad=5),
        MatDot("q8_0", 5, 96, 2, nan=True),
        MatDot("q4_0", 33, 96, 3, pad=1, act="silu"),
        MatDot("q4_k", 4, 256, 2, act="silu"),
        MatDot("q4_k", 4, 256, 2, pad=1, act="silu"),
        MatMulDot("q8_0", 63, 32, 16),
        MatMulDot("q4_1", 65, 96, 31, pad=3, bias=True),
        MatMulDot("q5_0", 129, 96, 40),
        MatMulDot("q4_0", 5, 96, 2, nan=True),
        MatMulDotCoop("q4_0", 67, 32, 33, pad=3, bias=True),
        MatMulDotCoop("q8_0", 129, 96, 65, nan=True),  # The second slice of 64 is incomplete.
        MatMulDotCoop("q4_k", 64, 256, 20, bias=True),
        MatDotId("q8_0", side=96, widths=(17, 32, 0, 40), rows=2, pieces=2),
        MatDotId("q4_0", side=33, widths=(32, 0, 96, 64), rows=2, used=4, pieces=2, **down),
        MatMulDotId("mxfp4", side=96, widths=(67, 3), rows=70, used=1, tile=32),
        MatMulDotId("q8_0", side=65, widths=(32, 0, 96, 64), rows=9, used=4, pieces=2, tile=8, **down),
    ]


def cases_of(kind: str) -> list[Case]:
    return [MatDot(kind, 5, 3 * block_of(kind)[0])] if kind in TYPES else []


def tiled_cases_of(kind: str) -> list[Case]:
    if kind not in TYPES:
        return []
    k, widths = 3 * block_of(kind)[0], (3, 0, 2)
    return [
        MatMulDot(kind, 3, k),
        *([MatMulDotCoop(kind, 3, k)] if kind in UNIT_TYPES else []),
        MatDotId(kind, side=k, widths=widths, used=3),
        MatMulDotId(kind, side=k, widths=widths, rows=3),
    ]


def wide() -> list[Case]:
    cases: list[Case] = [QuantizeQ8(k, rows) for k in (32, 64, 160, 4096) for rows in (1, 2, 31)]
    for kind in TYPES:
        block = block_of(kind)[0]
        k = 288 if 288 % block == 0 else 3 * block
        cases += [MatDot(kind, n, k, rows) for n in (1, 31, 33) for rows in range(1, 9)]
        cases += [MatDot(kind, n, k * 7, 1) for n in (2, 13)]
        cases += [MatMulDot(kind, n, k, rows) for n in (63, 64, 65) for rows in (15, 16, 17, 32, 33)]
        unit, side, widths = (32, 288, (11, 12, 13, 0)) if block == 32 else (block, 3 * block, (1, 0, 3, 2))
        pairs = tuple(unit * n for n in widths)
        for rows, tile in ((1, 16), (2, 24), (40, 32)):
            for case in (MatDotId, partial(MatMulDotId, tile=tile)):
                cases += [case(kind, ops.ROWS, side, pairs, rows, 4)]
                cases += [case(kind, ops.COLUMNS, 33, pairs, rows, 4, x_per_used=True, pieces=2)]
        if kind in UNIT_TYPES:
            cases += [MatMulDotCoop(kind, n, k, rows, bias=True) for n in (63, 65) for rows in (15, 17, 33)]
            cases += [MatMulDotCoop(kind, 64, 4096, 128)]
            cases += [MatMulDotCoop(kind, 4097, k, 65), MatMulDotCoop(kind, 8193, k, 97)]
        cases += [MatDot(kind, 64, block, 2), MatMulDot(kind, 2880, 2880 // block * block, 20)]
    return cases


def bench(kind: str) -> list[Case]:
    if kind not in TYPES:
        return []
    cases: list[Case] = [MatDot(kind, 3072, 1024, rows) for rows in (1, 2, 4, 8)]
    cases += [MatDot(kind, 1024, 3072), MatDot(kind, 256, 256), MatDot(kind, 16_384, 1024)]
    cases += [MatMulDot(kind, 3072, 1024, rows) for rows in (16, 32, 128)]
    if kind in UNIT_TYPES:
        cases += [MatMulDotCoop(kind, 3072, 1024, rows) for rows in (16, 128, 512)]
    experts: dict[str, Any] = {"side": 1024, "widths": (512,) * 8}
    return [*cases, MatDotId(kind, **experts), MatMulDotId(kind, **experts, rows=64)]
