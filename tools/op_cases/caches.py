from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from vkbackend import ops
from vkbackend.formats import dequantize
from vkbackend.ops import CELL_BLOCK, Recorder
from vkbackend.ops.attention_tiles import cells_per_block
from vkbackend.tools.op_cases.setup import (
    Case,
    RunSpec,
    Setup,
    Tensor,
    Views,
    cache,
    cell_table,
    cos_sin_of,
    n_rows_of,
    output,
    step_of,
    uniform,
)


@dataclass(frozen=True)
class KvStore(Case):
    """Values range from below F16's subnormals to above its maximum, and the last row's second block is zero.
    Stored bytes must equal the bytes that the twin stores. If norm or RoPE is applied, values are of one
    magnitude and are compared as numbers, because a value between two codes may round to either."""

    type: str = "f16"
    width: int = 64
    rows: int = 4
    runs: tuple[RunSpec, ...] = ((0, 0, 4),)
    ring: int | None = None
    head_dim: int = 0
    n_rot: int = 0
    half_split: bool = False
    norm: str = ""  # "plain" or "weighted".
    broken: bool = False  # Three blocks also contain NaN or inf.
    block: int = 1
    first: int = 0

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        """Return the NMSE if one element in 64 is rounded to a neighbouring code."""
        codes = {"f32": 1e-10, "f16": 1e-8, "bf16": 1e-6}
        return codes[self.type] if self.head_dim else 0.0

    def parts(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        if not self.head_dim or array.dtype != np.uint8:
            return {name: array}
        with np.errstate(invalid="ignore"):  # unwritten cells are NaN
            return {name: dequantize(array.reshape(-1), self.type, (len(array), self.width))}

    def setup(self, rng: np.random.Generator) -> Setup:
        cells, n_cells = cell_table(rng, self.runs, self.ring)
        n_blocks = n_cells // CELL_BLOCK
        magnitude = np.exp2(rng.uniform(-27, 17, (self.rows, self.width)))
        x = (magnitude * rng.choice([-1, 1], magnitude.shape)).astype(np.float32)
        ties = np.array(
            [1 + 2**-11, 1 + 3 * 2**-11, 65519, 65520, 2**-25, 1.5 * 2**-24, 2**-14, 0], np.float32
        )
        x.reshape(-1)[: min(8, x.size)] = ties[: x.size]
        # integers and halves, some of them in the middle between two codes of Q8_0 or IQ4_NL
        if self.width >= 64:
            x[0, 32:64] = rng.integers(-253, 254, 32) / 2
            x[0, 32] = -127
        x[-1, 32:64] = 0
        if self.broken:
            x[0, 5], x[0, self.width - 1], x[-1, 1] = np.nan, np.inf, -np.inf
        tensors = {
            "x": uniform(rng, *x.shape) if self.head_dim else Tensor(x.shape, "f32", x),
            "cells": cells,
            "cache": output(self.first + n_blocks * cells_per_block(self.block), self.width, dtype=self.type),
        }
        if self.norm == "weighted":
            tensors["w"] = uniform(rng, self.head_dim)
        if self.n_rot:
            tensors["cos_sin"] = cos_sin_of(rng, self.rows, self.n_rot)

        def record(r: Recorder, v: Views) -> None:
            args = v["x"], v["cells"], v["cache"], v["step"]
            norm = ops.HeadNorm(v.get("w"), 1e-5) if self.norm else None
            rotation = ops.Rotation(v["cos_sin"], self.half_split) if self.n_rot else None
            cell: dict[str, Any] = {"block": self.block, "first": self.first}
            r.kv_store(*args, head_dim=self.head_dim, norm=norm, rotation=rotation, **cell)

        return Setup(tensors, record, step_of(rng, self.runs))


@dataclass(frozen=True)
class KvLoad(Case):
    """Each row reads the position that is `distance` above the row's position. Cells outside the runs are
    NaN."""

    type: str = "f16"
    width: int = 64
    rows: int = 5
    runs: tuple[RunSpec, ...] = ((0, 0, 4),)
    distance: int = 1
    head_dim: int = 16
    n_rot: int = 0
    half_split: bool = False
    tolerance: ClassVar[float] = 1e-11

    def setup(self, rng: np.random.Generator) -> Setup:
        held = tuple((slot, first + self.distance, n) for slot, first, n in self.runs)
        cells, n_cells = cell_table(rng, held)
        tensors = {
            "cells": cells,
            "cache": cache(rng, self.type, cells, n_cells, self.width, held),
            "y": output(self.rows, self.width),
        }
        if self.n_rot:
            tensors["cos_sin"] = cos_sin_of(rng, self.rows, self.n_rot)
        step = step_of(rng, self.runs)
        n = n_rows_of(self.runs)
        step.rows[:n, 2] = step.rows[:n, 0] + self.distance

        def record(r: Recorder, v: Views) -> None:
            rotation = ops.Rotation(v["cos_sin"], self.half_split) if self.n_rot else None
            args = v["cache"], v["cells"], v["y"], v["step"]
            r.kv_load(*args, head_dim=self.head_dim, rotation=rotation)

        return Setup(tensors, record, step)


@dataclass(frozen=True)
class Hadamard(Case):
    """If `out` is not `head`, zeros are appended to each head, or each head is cut."""

    rows: int = 3
    heads: int = 2
    head: int = 64
    out: int = 64
    tolerance: ClassVar[float] = 1e-12

    def setup(self, rng: np.random.Generator) -> Setup:
        x, y = uniform(rng, self.rows, self.heads, self.head), output(self.rows, self.heads, self.out)
        return Setup({"x": x, "y": y}, lambda r, v: r.hadamard(v["x"], v["y"]))


_RUNS = ((2, 30, 3), (0, 0, 1), (3, 95, 2))


def quick() -> list[Case]:
    return [
        KvStore("f16", 64, 8, _RUNS),
        KvStore("f32", 24, 6, _RUNS),
        KvStore("f16", 2, 1, ((0, 31, 1),)),
        KvStore("bf16", 24, 6, _RUNS),
        # A row of 3 blocks shares a word with a neighbouring row. Runs write one or both of these rows.
        KvStore("q8_0", 96, 8, ((2, 29, 4), (0, 0, 1), (3, 95, 2))),
        KvStore("q4_0", 96, 6, _RUNS, broken=True),
        KvStore("q8_0", 128, 6, _RUNS, broken=True),
        KvStore("q4_0", 32, 9, ((0, 4, 1), (1, 5, 1), (2, 5, 3), (3, 62, 4))),
        KvStore("q4_1", 96, 8, ((2, 29, 4), (0, 0, 1), (3, 95, 2)), broken=True),
        KvStore("q5_0", 96, 8, ((2, 29, 4), (0, 0, 1), (3, 95, 2)), broken=True),
        KvStore("q5_1", 160, 6, _RUNS, broken=True),
        KvStore("iq4_nl", 96, 8, ((2, 29, 4), (0, 0, 1), (3, 95, 2)), broken=True),
        KvStore("f32", 8, 6, ((1, 126, 5), (0, 31, 1)), ring=2),
        KvStore("f32", 48, 6, _RUNS, head_dim=24, n_rot=16),
        KvStore("f16", 64, 8, _RUNS, head_dim=16, n_rot=16, half_split=True),
        KvStore("f16", 240, 6, _RUNS, head_dim=80, n_rot=32, half_split=True, norm="weighted"),
        KvStore("bf16", 40, 6, _RUNS, head_dim=8, norm="plain"),
        # Rows of 3 blocks or one. Cells of rows that are 4 or 12 positions apart share a word.
        KvStore("q8_0", 96, 40, ((2, 29, 30), (0, 2, 6), (3, 95, 3)), block=4, first=64),
        KvStore("q4_0", 32, 40, ((1, 5, 33), (0, 11, 1)), block=12, first=2),
        KvStore("iq4_nl", 96, 9, ((1, 120, 8),), block=128),
        KvStore("q5_1", 64, 12, ((1, 5, 10), (0, 7, 2)), block=8, first=32),
        KvStore("f16", 64, 40, ((1, 100, 40),), head_dim=16, n_rot=16, norm="plain", block=4, first=96),
        Hadamard(),
        Hadamard(1, 3, 80, 96),
        Hadamard(5, 1, 160, 136),
        Hadamard(2, 7, 8, 32),
        KvLoad(),
        KvLoad("f32", 24, 6, _RUNS, 7, 24, 14, half_split=True),
        KvLoad("f32", 12, 2, ((1, 31, 1),), 33, 4, 4),
        KvLoad("bf16", 40, 7, _RUNS, 32, 8, 6),
        KvLoad("f16", 240, 6, _RUNS, 100, 80, 32, half_split=True),
        KvLoad("q8_0", 96, 8, _RUNS, 3, 32, 32),
        KvLoad("q4_0", 192, 6, _RUNS, 1, 96, 90, half_split=True),
        KvLoad("q4_0", 32, 1, ((0, 0, 1),), 64, 32),
        KvLoad("q4_1", 96, 6, _RUNS, 1, 96, 90),
        KvLoad("q5_0", 96, 6, _RUNS, 3, 32, 32, half_split=True),
        KvLoad("q5_1", 64, 6, _RUNS, 1, 32, 32),
        KvLoad("iq4_nl", 96, 6, _RUNS, 1, 96, 90),
    ]


def bench() -> list[Case]:
    """Return the ops of an 8B model's layer after 64 positions."""
    loads = [KvLoad(kind, 1024, 512, ((0, 64, 512),), 512, 128, 128) for kind in ("f16", "q8_0")]
    stores = [
        KvStore(kind, 1024, n, ((0, 64, n),))
        for kind in ("f16", "q8_0", "q4_0", "q5_1", "iq4_nl")
        for n in (1, 32)
    ]
    return [*loads, *stores, Hadamard(1, 32, 128, 128), Hadamard(512, 32, 128, 128)]
