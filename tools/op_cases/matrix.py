from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from vkbackend import ops
from vkbackend.formats import block_of
from vkbackend.ops import Recorder
from vkbackend.tools.op_cases.setup import Case, Setup, Views, operand, output, uniform, weights


def row_scales(rows: int) -> np.ndarray:
    return np.exp2(np.arange(rows)[:, None] % 7 - 3).astype(np.float32)


@dataclass(frozen=True)
class MatVec(Case):
    """Multiply w [n, k] by x [rows, k]. Rows of y are n + `pad` elements apart. If `act` is set, w is the
    gate and a second matrix is `up`. If `nan` is set, the last row of x contains one NaN."""

    op: ClassVar[ops.MatrixOp] = ops.MATRIX_OPS["mat_vec"]
    tolerance: ClassVar[float] = 1e-9
    type: str = "f32"
    n: int = 16
    k: int = 64
    rows: int = 1
    pad: int = 0
    scale: float = 1.0  # of w
    bias: bool = False
    act: str = ""
    nan: bool = False
    span: float = 1.0  # of x

    @property
    def needs(self) -> tuple[str, ...]:
        return self.op.needs

    def setup(self, rng: np.random.Generator) -> Setup:
        stride = self.n + self.pad
        x = rng.uniform(-self.span, self.span, (self.rows, self.k)).astype(np.float32)
        if self.op.x_type == "f16s":  # has row scales
            x *= row_scales(self.rows)
        if self.nan:
            x[-1, rng.integers(0, self.k)] = np.nan
        tensors = {
            "w": weights(rng, self.type, self.n, self.k, scale=self.scale),
            "x": operand(x, self.op.x_type),
            "y": output(self.rows * stride),
        }
        if self.bias:
            tensors["bias"] = uniform(rng, self.n)
        if self.act:
            tensors["up"] = weights(rng, self.type, self.n, self.k, scale=self.scale)
        for name in {"w", "x", "up"} & tensors.keys():
            # Tensors are aligned to 256 bytes as in a model. If n is odd or `up` is padded, they are aligned
            # to 4 bytes.
            least = self.n % 2 == 1 or (name == "up" and self.pad)
            tensors[name].align = 4 if least else 256

        def record(r: Recorder, v: Views) -> None:
            how: dict[str, Any] = {"up": v["up"], "act": self.act} if self.act else {"bias": v.get("bias")}
            self.op(r, v["w"], v["x"], v["y"], y_stride=stride, **how)

        return Setup(tensors, record)


@dataclass(frozen=True)
class MatMul(MatVec):
    op = ops.MATRIX_OPS["mat_mul"]
    rows: int = 9


@dataclass(frozen=True)
class MatTile(MatMul):
    op = ops.MATRIX_OPS["mat_tile"]


@dataclass(frozen=True)
class MatWave(MatVec):
    op = ops.MATRIX_OPS["mat_wave"]


@dataclass(frozen=True)
class MatLane(MatVec):
    op = ops.MATRIX_OPS["mat_lane"]


def quick() -> list[Case]:
    return [
        MatVec("f32", 1, 1),
        MatVec("f32", 31, 2051, 2),
        MatVec("f16", 33, 2051, 1),
        MatVec("f16", 5, 3, 3, pad=2, bias=True),
        MatVec("f16", 64, 96, scale=5e-5),  # Subnormal F16.
        MatVec("q8_0", 33, 32),  # Rows have 34 bytes.
        MatVec("q8_0", 17, 96, 5, pad=7),
        MatVec("q8_0", 576, 1536),
        MatVec("q8_0", 32, 64, scale=6e-3),  # subnormal scales
        MatVec("q4_0", 127, 32, 8),
        MatVec("q4_0", 129, 576),
        MatMul("f32", 1, 1, 9),
        MatMul("f32", 65, 67, 33, pad=3, bias=True),
        MatMul("f16", 64, 2051, 17),
        MatMul("q8_0", 63, 32, 16),
        MatMul("q8_0", 576, 1536, 40),
        MatMul("q4_0", 129, 96, 31),
        MatTile("f32", 1, 1, 9),
        MatTile("f16", 67, 35, 33, pad=3, bias=True),
        MatVec("f16", 33, 67, 3, pad=2, act="silu"),
        MatVec("q4_0", 1, 32, 3, act="swiglu_oai"),  # values may almost cancel
        MatWave("q8_0", 33, 96, 3, pad=1, act="gelu"),
        MatWave("f32", 1, 1),
        MatWave("f16", 33, 2051, 2, pad=3, bias=True),
        MatWave("q8_0", 65, 96, 3),
        MatWave("q4_0", 129, 576),
        MatWave("f16", 34, 64, 3),
        MatWave("bf16", 6, 2048, 8, pad=1, bias=True),
        MatWave("f32", 2, 192, 3, act="silu"),
        MatWave("f16", 4, 64, pad=1, act="silu"),
        MatLane("f32", 1, 1, act="none"),
        MatLane("q4_0", 33, 96, 9, pad=1, act="gelu"),
        MatLane("f16", 16, 67, act="sigmoid"),
        MatLane("f32", 33, 67, 9, pad=3, bias=True),
        MatLane("f16", 5, 2051, 3),
        MatLane("q8_0", 31, 96, 17, pad=1),
        MatLane("q4_0", 129, 576, 2),
    ]


def wide(kind: str) -> list[Case]:
    block = block_of(kind)[0]
    k = 288 if 288 % block == 0 else 3 * block
    return [
        *(MatVec(kind, n, k, rows) for n in (1, 31, 32, 33) for rows in range(1, 9)),
        *(MatMul(kind, n, k, rows) for n in (63, 64, 65) for rows in (15, 16, 17, 32, 33)),
        *(MatTile(kind, n, k, rows) for n in (63, 64, 65) for rows in (15, 16, 17, 32, 33)),
        MatTile(kind, 8065, k, 65),  # lavapipe needs 15 s to compile the tiles of 128 x 64
        *(MatWave(kind, n, 2 * k, rows) for n in (1, 31, 33) for rows in (1, 3, 8)),
        *(MatLane(kind, n, 2 * k, rows) for n in (1, 31, 33) for rows in (1, 3, 9, 25)),
        MatVec(kind, 2880, 2880 // block * block, 2),
        MatVec(kind, 6, 4096, 3),
        MatMul(kind, 64, 4096, 128),
        MatVec(kind, 16, k, scale=1e-3),
    ]


def some_of(kind: str, k: int) -> list[Case]:
    return [MatVec(kind, 5, k), MatMul(kind, 3, k), MatLane(kind, 5, k), MatWave(kind, 5, k)]


def some_of_gpus(kind: str, k: int) -> list[Case]:
    """These cases are only in the wide sweep, because software drivers compile their pipelines slowly."""
    return [MatTile(kind, 3, k)]


def bench(kind: str) -> list[Case]:
    """Return products with matrices of a 0.6B model (n_embd 1024) and with a matrix that fits every cache."""
    return [
        *(MatVec(kind, 3072, 1024, rows) for rows in (1, 2, 4, 8)),
        MatVec(kind, 1024, 3072),
        MatVec(kind, 256, 256),
        MatVec(kind, 16_384, 1024),
        *(MatMul(kind, 3072, 1024, rows) for rows in (16, 32, 128)),
        MatMul(kind, 256, 256, 16),
        *(MatTile(kind, 3072, 1024, rows) for rows in (16, 128, 512)),
        *(MatWave(kind, 3072, 1024, rows) for rows in (1, 2, 4, 8)),
        *(MatLane(kind, 3072, 1024, rows) for rows in (1, 2, 4, 8, 16, 32, 128)),
        MatLane(kind, 1024, 3072),
        MatLane(kind, 256, 256),
        MatLane(kind, 256, 256, 16),
    ]
