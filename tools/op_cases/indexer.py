from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from vkbackend.limits import Limits
from vkbackend.ops import CELL_BLOCK, OPS, Recorder
from vkbackend.ops.attention_tiles import cells_per_block
from vkbackend.ops.indexer import maxima_tile, score_tile
from vkbackend.tools.op_cases.setup import (
    Case,
    RunSpec,
    Setup,
    Tensor,
    Views,
    cache,
    cell_table,
    n_rows_of,
    output,
    step_of,
    uniform,
)

RUNS = ((2, 30, 3), (0, 0, 1), (3, 95, 2))
LONG = ((1, 300, 2), (0, 127, 2))


_MANY = ((1, 300, 9), (2, 5, 1), (0, 123, 11))


def cache_of_blocks(
    rng: np.random.Generator,
    dtype: str,
    cells: Tensor,
    n_cells: int,
    width: int,
    runs: tuple[RunSpec, ...],
    block: int,
) -> Tensor:
    n = n_cells // CELL_BLOCK * cells_per_block(block)
    return cache(rng, dtype, cells, n, width, runs, block=block)


@dataclass(frozen=True)
class IndexScores(Case):
    tolerance: ClassVar[float] = 1e-9
    runs: tuple[RunSpec, ...] = ((0, 0, 1),)
    n_heads: int = 4
    head: int = 32
    type_k: str = "f16"
    first_row: int = 0
    block: int = 1
    n_best: int = 0
    weighted: bool = True
    tile_rows: int = 0

    def setup(self, rng: np.random.Generator) -> Setup:
        rows = n_rows_of(self.runs) + 1 - self.first_row
        cells, n_cells = cell_table(rng, self.runs)
        k = cache_of_blocks(rng, self.type_k, cells, n_cells, self.head, self.runs, self.block)
        tensors = {
            "q": uniform(rng, rows, self.n_heads, self.head),
            "w": uniform(rng, rows, self.n_heads),
            "k": replace(k, align=16 if self.needs else 4),
            "cells": cells,
            "y": output(rows, cells.shape[1] * CELL_BLOCK // self.block),
        }

        def record(r: Recorder, v: Views) -> None:
            w = v["w"] if self.weighted else None
            score = r.index_scores_coop if self.needs else r.index_scores
            how: dict[str, Any] = {"first_row": self.first_row, "block": self.block, "n_best": self.n_best}
            if self.needs:
                how["tile_rows"] = self.tile_rows
            score(v["q"], w, *(v[name] for name in ("k", "cells", "y", "step")), **how)

        return Setup(tensors, record, step_of(rng, self.runs))


@dataclass(frozen=True)
class IndexScoresCoop(IndexScores):
    """Rounding to F16 has a relative error u of 2^-11, so each product of q and k has an NMSE of about
    2 u^2 / 3. The heads' errors are independent, but weights of both signs cancel the scores by half."""

    tolerance: ClassVar[float] = 1e-6

    @property
    def needs(self) -> tuple[str, ...]:
        return OPS["index_scores_coop"].needs

    def fits(self, limits: Limits) -> bool:
        return score_tile(limits, self.n_heads, self.head) is not None


@dataclass(frozen=True)
class PoolKeys(Case):
    tolerance: ClassVar[float] = 1e-9
    runs: tuple[RunSpec, ...] = ((0, 3, 1),)
    block: int = 4
    head: int = 32
    type_k: str = "f16"
    gated: bool = True
    first: int = 0
    overlap: bool = False

    def setup(self, rng: np.random.Generator) -> Setup:
        rows = n_rows_of(self.runs) + 1
        cells, n_cells = cell_table(rng, self.runs)
        series = 1 + self.overlap
        width = (1 + self.gated) * series * self.head + 2 * self.first
        tensors = {
            "k": cache(rng, self.type_k, cells, n_cells, width, self.runs),
            "cells": cells,
            "bias": uniform(rng, self.block, series * self.head),
            "y": output(rows, self.head),
        }

        def record(r: Recorder, v: Views) -> None:
            bias = v["bias"] if self.gated else None
            how: dict[str, Any] = {"block": self.block, "first": self.first, "overlap": self.overlap}
            r.pool_keys(v["k"], v["cells"], v["y"], v["step"], bias=bias, **how)

        return Setup(tensors, record, step_of(rng, self.runs))


@dataclass(frozen=True)
class IndexMaxima(Case):
    tolerance: ClassVar[float] = 1e-9
    runs: tuple[RunSpec, ...] = ((0, 0, 1),)
    n_heads: int = 2
    head: int = 32
    block: int = 8
    n_local: int = 1
    type_k: str = "f16"
    first_row: int = 0
    n_best: int = 0
    tile_rows: int = 0

    def setup(self, rng: np.random.Generator) -> Setup:
        rows = n_rows_of(self.runs) + 1 - self.first_row
        cells, n_cells = cell_table(rng, self.runs)
        keys = cache(rng, self.type_k, cells, n_cells, self.head, self.runs)
        tensors = {
            "q": uniform(rng, rows, self.n_heads, self.head),
            "k": replace(keys, align=16 if self.needs else 4),
            "cells": cells,
            "y": output(rows, self.n_heads, -(-cells.shape[1] * CELL_BLOCK // self.block)),
        }

        def record(r: Recorder, v: Views) -> None:
            args = (v[name] for name in ("q", "k", "cells", "y", "step"))
            how: dict[str, Any] = {"n_local": self.n_local, "n_best": self.n_best, "block": self.block}
            score = r.index_maxima_coop if self.needs else r.index_maxima
            if self.needs:
                how["tile_rows"] = self.tile_rows
            score(*args, first_row=self.first_row, **how)

        return Setup(tensors, record, step_of(rng, self.runs))

    def parts(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        is_local = array == np.finfo(np.float32).max
        return {name: np.where(is_local, np.float32(0), array), "local": is_local.astype(np.float32)}


@dataclass(frozen=True)
class IndexMaximaCoop(IndexMaxima):
    """Rounding to F16 has a relative error u of 2^-11, so each product of q and k has an NMSE of about
    2 u^2 / 3."""

    tolerance: ClassVar[float] = 1e-6

    @property
    def needs(self) -> tuple[str, ...]:
        return OPS["index_maxima_coop"].needs

    def fits(self, limits: Limits) -> bool:
        return maxima_tile(limits, self.n_heads, self.head, self.block, self.n_local) is not None


@dataclass(frozen=True)
class IndexTopK(Case):
    """Scores have `values` different values with ties, and zeros of both signs. `nan` adds NaN and
    infinities. Positions after the row's own have the largest scores and must not be chosen."""

    tolerance: ClassVar[float] = 0.0
    runs: tuple[RunSpec, ...] = ((0, 0, 1),)
    k: int = 4
    values: int = 1000
    nan: bool = False
    first_row: int = 0
    n_lists: int = 1
    block: int = 1
    tail: bool = False

    def setup(self, rng: np.random.Generator) -> Setup:
        rows = (n_rows_of(self.runs) + 1 - self.first_row) * self.n_lists
        n = -(-max(first + n for _, first, n in self.runs) // CELL_BLOCK) * CELL_BLOCK
        x = (rng.integers(-self.values // 2, self.values // 2 + 1, (rows, n)) / 16).astype(np.float32)
        x *= rng.choice(np.array([-1, 1], np.float32), x.shape)
        if self.nan:
            x[:, ::7], x[:, 1::7], x[:, 2::7] = np.nan, np.inf, -np.inf
        step = step_of(rng, self.runs)
        for row in range(rows - self.n_lists):
            end = int(step.rows[self.first_row + row // self.n_lists, 0]) + 1
            x[row, end // self.block if self.tail else -(-end // self.block) :] = 1e30
        tensors = {"x": Tensor(x.shape, "f32", x), "ids": output(rows, self.k, dtype="u32")}

        def record(r: Recorder, v: Views) -> None:
            how: dict[str, Any] = {"n_lists": self.n_lists, "block": self.block, "tail": self.tail}
            r.index_top_k(v["x"], v["ids"], v["step"], first_row=self.first_row, **how)

        return Setup(tensors, record, step)


def quick() -> list[Case]:
    return [
        IndexScores(((0, 0, 1),), 1, 8),
        IndexScores(RUNS, 17, 40, "f32"),
        IndexScores(LONG, 5, 32),
        IndexScores(RUNS, 9, 128, "q8_0", first_row=2),
        IndexScores(RUNS, 3, 256, "bf16"),
        IndexScores(LONG, 8, 32, "q4_0"),
        IndexScores(RUNS, 9, 128, "q5_0"),
        IndexScores(LONG, 5, 32, block=4),
        IndexScores(RUNS, 3, 64, "f32", first_row=1, block=32),
        IndexScores(LONG, 3, 32, n_best=128, weighted=False),
        IndexScoresCoop(((0, 0, 1),), 1, 16),
        IndexScoresCoop(LONG, 64, 128),
        IndexScoresCoop(RUNS, 17, 48, "f32", tile_rows=2),
        IndexScoresCoop(_MANY, 9, 128, "q8_0", first_row=2, tile_rows=3),
        IndexScoresCoop(RUNS, 5, 256, "bf16", weighted=False),
        IndexScoresCoop(_MANY, 8, 32, "q4_0", n_best=128, tile_rows=8),
        IndexScoresCoop(_MANY, 33, 32, block=4, weighted=False, tile_rows=4),
        IndexScoresCoop(RUNS, 3, 64, "q5_1", first_row=1, block=32),
        PoolKeys(),
        PoolKeys(((2, 30, 6), (0, 0, 2)), 4, 24, gated=False),
        PoolKeys(((2, 30, 6), (0, 0, 2), (3, 95, 2)), 2, 136, "f32"),
        PoolKeys(((0, 60, 70), (1, 15, 1)), 16, 8, "bf16"),
        PoolKeys(((2, 3, 6), (0, 0, 4), (3, 95, 1)), 4, 24, "f32", first=8, overlap=True),
        PoolKeys(((0, 60, 70), (1, 15, 1)), 16, 136, overlap=True),
        IndexMaxima(),
        IndexMaxima(RUNS, 4, 40, 7, 2, "f32"),
        IndexMaxima(LONG, 17, 32, 64, 1, "q8_0", first_row=1),
        IndexMaxima(RUNS, 3, 256, 128, 1, "bf16"),
        IndexMaxima(LONG, 3, 32, 32, 2, n_best=4),
        IndexMaximaCoop(LONG, 4, 128, 64, 1),
        IndexMaximaCoop(RUNS, 3, 48, 64, 1, "f32", tile_rows=2),
        IndexMaximaCoop(_MANY, 2, 32, 64, 1, "q8_0", first_row=2, tile_rows=3),
        IndexMaximaCoop(_MANY, 4, 256, 64, 2, "bf16", n_best=3, tile_rows=4),
        IndexMaximaCoop(_MANY, 17, 64, 128, 1, "q5_1", first_row=1),
        IndexTopK(((0, 0, 1),), 1),
        IndexTopK(((0, 63, 2),), 40, nan=True),
        IndexTopK(LONG, 5, n_lists=3, block=7),
        IndexTopK(LONG, 9, values=9, n_lists=2, block=4, tail=True, first_row=1),
        IndexTopK(RUNS, 31, block=4, tail=True),
        IndexTopK(RUNS, 31),
        IndexTopK(LONG, 64, values=9),
        IndexTopK(LONG, 127, nan=True),
        IndexTopK(LONG, 128, values=1, first_row=1),
        IndexTopK(((0, 2046, 4),), 2048),
        IndexTopK(((0, 4999, 1), (1, 2999, 1)), 2048, values=10**7),
    ]


def wide() -> list[Case]:
    cases: list[Case] = [IndexScores(LONG, 64, 128)]
    for k in (1, 31, 32, 33, 255, 256, 257):
        for nan in (False, True):
            cases += [IndexTopK(LONG, k, values, nan) for values in (1, 9, 10**6)]
    for kind in ("f32", "f16", "bf16", "q8_0", "q4_0"):
        for n in (1, 5, 16):
            cases.append(IndexMaximaCoop(_MANY, n, (32, 96)[n % 2], 64, 1, kind, tile_rows=n % 5))
        for n in (1, 15, 33):
            cases += [IndexScores(LONG, n, head, kind) for head in (32, 96)]
            cases += [IndexScoresCoop(_MANY, n, head, kind, tile_rows=n % 5) for head in (32, 96)]
    return cases


def bench() -> list[Case]:
    """Return the ops of a DeepSeek V3.2 layer at 16,384 positions on one of four devices."""
    runs = ((0, 16_383, 1),)
    return [
        IndexScores(runs, 64, 128),
        IndexScoresCoop(runs, 64, 128),
        IndexScoresCoop(runs, 64, 128, tile_rows=8),
        IndexTopK(runs, 2048),
        IndexMaxima(runs, 4, 128, 128),
        IndexMaximaCoop(runs, 4, 128, 128),
        IndexMaximaCoop(((0, 3_840, 256),), 4, 128, 128),
    ]
