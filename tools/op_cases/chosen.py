from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from vkbackend.limits import Limits
from vkbackend.ops import CELL_BLOCK, OPS, Recorder
from vkbackend.ops.attention_tiles import cells_per_block, tile_of_chosen
from vkbackend.ops.indexer import score_tile
from vkbackend.step import Mix
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
    split_parts,
    step_of,
    uniform,
)


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

    def setup(self, rng: np.random.Generator) -> Setup:
        rows = n_rows_of(self.runs) + 1 - self.first_row
        cells, n_cells = cell_table(rng, self.runs)
        tensors = {
            "q": uniform(rng, rows, self.n_heads, self.head),
            "k": cache(rng, self.type_k, cells, n_cells, self.head, self.runs),
            "cells": cells,
            "y": output(rows, self.n_heads, -(-cells.shape[1] * CELL_BLOCK // self.block)),
        }

        def record(r: Recorder, v: Views) -> None:
            args = (v[name] for name in ("q", "k", "cells", "y", "step"))
            how: dict[str, Any] = {"n_local": self.n_local, "n_best": self.n_best}
            r.index_maxima(*args, block=self.block, first_row=self.first_row, **how)

        return Setup(tensors, record, step_of(rng, self.runs))

    def parts(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        return {name: np.where(array == np.finfo(np.float32).max, np.float32(1e3), array)}


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


@dataclass(frozen=True)
class AttnChosen(Case):
    """Each row attends to its own list of chosen positions. Unused entries at the list's end are invalid
    positions. Rows of long runs at positions below `dense` do not change."""

    tolerance: ClassVar[float] = 1e-9
    runs: tuple[RunSpec, ...] = ((0, 0, 1),)
    n_heads: int = 2
    n_kv: int = 1
    head_k: int = 16
    head_v: int = 16
    k: int = 20
    n_splits: int | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    group: int | None = None
    q_first: int = 0
    n_lists: int = 1
    block: int = 1
    tail: bool = False
    dense: int = 0

    def setup(self, rng: np.random.Generator) -> Setup:
        rows = n_rows_of(self.runs) + 1
        cells, n_cells = cell_table(rng, self.runs)
        step = step_of(rng, self.runs, mix=Mix.BOTH if self.dense else Mix.DECODE)
        chosen = np.full((rows * self.n_lists, self.k), 0x7FFFFFFF, np.uint32)
        for i in range((rows - 1) * self.n_lists):
            end = int(step.rows[i // self.n_lists, 0]) + 1
            n, own = -(-end // self.block), not self.tail or end % self.block > 0
            k = self.k - (self.tail and not own)
            others = np.sort(rng.permutation(n - own)[: k - own])
            ids = [*others, n - 1] if own and self.block > 1 else np.sort(rng.permutation(n)[:k])
            chosen[i, : len(ids)] = ids
        splits = (self.n_splits, self.head_v + 2) if self.n_splits else (self.head_v,)
        align = 16 if self.needs else 4  # as in attention.py
        k_cache = cache(rng, self.type_k, cells, n_cells, self.n_kv * self.head_k, self.runs)
        v_cache = cache(rng, self.type_v, cells, n_cells, self.n_kv * self.head_v, self.runs)
        tensors = {
            "q": uniform(rng, rows, self.n_heads, self.head_k, span=8.0),
            "k": replace(k_cache, align=align),
            "v": replace(v_cache, align=align),
            "cells": cells,
            "chosen": Tensor(chosen.shape, "u32", chosen),
            "y": output(rows, self.n_heads, *splits),
        }

        def record(r: Recorder, v: Views) -> None:
            args = (v[name] for name in ("q", "k", "v", "cells", "chosen", "y", "step"))
            group = self.group or self.n_heads // self.n_kv
            how: dict[str, Any] = {"block": self.block, "tail": self.tail}
            if self.needs:
                how["dense"] = self.dense
            attend = r.attn_chosen_coop if self.needs else r.attn_chosen
            attend(*args, scale=self.head_k**-0.5, group=group, q_first=self.q_first, **how)

        return Setup(tensors, record, step)

    def parts(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        return split_parts(array, self.head_v) if self.n_splits else {name: array}


@dataclass(frozen=True)
class AttnChosenCoop(AttnChosen):
    """The rounding errors are those of AttnDecodeCoop."""

    tolerance: ClassVar[float] = 4e-6

    @property
    def needs(self) -> tuple[str, ...]:
        return OPS["attn_chosen_coop"].needs

    def fits(self, limits: Limits) -> bool:
        group = self.group or self.n_heads // self.n_kv
        return tile_of_chosen(limits, group, self.head_k, self.head_v) is not None


@dataclass(frozen=True)
class AttnEntries(Case):
    """Each row attends to its last `window` positions, and to all entries or to the entries of a list. Unused
    elements at the list's end are invalid blocks."""

    tolerance: ClassVar[float] = 1e-9
    runs: tuple[RunSpec, ...] = ((0, 0, 1),)
    n_heads: int = 2
    head: int = 16
    window: int = 12
    block: int = 4
    k: int = 0
    n_splits: int | None = None
    kind: str = "f16"
    group: int | None = None
    q_first: int = 0

    def setup(self, rng: np.random.Generator) -> Setup:
        rows = n_rows_of(self.runs) + 1
        cells, n_cells = cell_table(rng, self.runs)
        step = step_of(rng, self.runs)
        chosen = np.full((rows, max(1, self.k)), 0x7FFFFFFF, np.uint32)
        for row in range(rows - 1):
            n = (int(step.rows[row, 0]) + 1) // self.block
            ids = np.sort(rng.permutation(n)[: max(0, self.k - 1)])
            chosen[row, : len(ids)] = ids
        splits = (self.n_splits, self.head + 2) if self.n_splits else (self.head,)
        entry_cells, n_of_entries = cell_table(rng, self.runs)
        args = rng, self.kind, entry_cells, n_of_entries, self.head, self.runs
        entries = cache_of_blocks(*args, self.block)
        vectors = cache(rng, self.kind, cells, n_cells, self.head, self.runs, self.window)
        assert vectors.raw is not None and entries.raw is not None
        tensors = {
            "q": uniform(rng, rows, self.n_heads, self.head, span=8.0),
            "kv": Tensor(
                (n_cells + entries.shape[0], self.head),
                self.kind,
                np.concatenate([vectors.raw, entries.raw]),
            ),
            "cells": cells,
            "entry_cells": entry_cells,
            "chosen": Tensor(chosen.shape, "u32", chosen),
            "y": output(rows, self.n_heads, *splits),
        }

        def record(r: Recorder, v: Views) -> None:
            how: dict[str, Any] = {"window": self.window, "block": self.block, "q_first": self.q_first}
            how |= {"group": self.group or self.n_heads, "scale": self.head**-0.5, "first_entry": n_cells}
            lists = v["chosen"] if self.k else None
            args = v["q"], v["kv"], v["cells"], v["entry_cells"], lists, v["y"], v["step"]
            r.attn_entries(*args, **how)

        return Setup(tensors, record, step)

    def parts(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        return split_parts(array, self.head) if self.n_splits else {name: array}


_RUNS = ((2, 30, 3), (0, 0, 1), (3, 95, 2))
_LONG = ((1, 300, 2), (0, 127, 2))
_MANY = ((1, 300, 9), (2, 5, 1), (0, 123, 11))


def quick() -> list[Case]:
    return [
        IndexScores(((0, 0, 1),), 1, 8),
        IndexScores(_RUNS, 17, 40, "f32"),
        IndexScores(_LONG, 5, 32),
        IndexScores(_RUNS, 9, 128, "q8_0", first_row=2),
        IndexScores(_RUNS, 3, 256, "bf16"),
        IndexScores(_LONG, 8, 32, "q4_0"),
        IndexScores(_RUNS, 9, 128, "q5_0"),
        IndexScores(_LONG, 5, 32, block=4),
        IndexScores(_RUNS, 3, 64, "f32", first_row=1, block=32),
        IndexScores(_LONG, 3, 32, n_best=128, weighted=False),
        IndexScoresCoop(((0, 0, 1),), 1, 16),
        IndexScoresCoop(_LONG, 64, 128),
        IndexScoresCoop(_RUNS, 17, 48, "f32", tile_rows=2),
        IndexScoresCoop(_MANY, 9, 128, "q8_0", first_row=2, tile_rows=3),
        IndexScoresCoop(_RUNS, 5, 256, "bf16", weighted=False),
        IndexScoresCoop(_MANY, 8, 32, "q4_0", n_best=128, tile_rows=8),
        IndexScoresCoop(_MANY, 33, 32, block=4, weighted=False, tile_rows=4),
        IndexScoresCoop(_RUNS, 3, 64, "q5_1", first_row=1, block=32),
        PoolKeys(),
        PoolKeys(((2, 30, 6), (0, 0, 2)), 4, 24, gated=False),
        PoolKeys(((2, 30, 6), (0, 0, 2), (3, 95, 2)), 2, 136, "f32"),
        PoolKeys(((0, 60, 70), (1, 15, 1)), 16, 8, "bf16"),
        PoolKeys(((2, 3, 6), (0, 0, 4), (3, 95, 1)), 4, 24, "f32", first=8, overlap=True),
        PoolKeys(((0, 60, 70), (1, 15, 1)), 16, 136, overlap=True),
        IndexMaxima(),
        IndexMaxima(_RUNS, 4, 40, 7, 2, "f32"),
        IndexMaxima(_LONG, 17, 32, 64, 1, "q8_0", first_row=1),
        IndexMaxima(_RUNS, 3, 256, 128, 1, "bf16"),
        IndexMaxima(_LONG, 3, 32, 32, 2, n_best=4),
        IndexTopK(((0, 0, 1),), 1),
        IndexTopK(_LONG, 5, n_lists=3, block=7),
        IndexTopK(_LONG, 9, values=9, n_lists=2, block=4, tail=True, first_row=1),
        IndexTopK(_RUNS, 31, block=4, tail=True),
        IndexTopK(_RUNS, 31),
        IndexTopK(_LONG, 64, values=9),
        IndexTopK(_LONG, 127, nan=True),
        IndexTopK(_LONG, 128, values=1, first_row=1),
        IndexTopK(((0, 2046, 4),), 2048),
        IndexTopK(((0, 4999, 1), (1, 2999, 1)), 2048, values=10**7),
        AttnChosen(((0, 0, 1),), 1, 1, 8, 8, k=1),
        AttnChosen(_RUNS, 6, 2, 64, 64, n_splits=3),
        AttnChosen(_LONG, 6, 2, 32, 32, 5, 2, n_lists=2, block=7),
        AttnChosen(_LONG, 4, 2, 16, 16, 9, block=4, tail=True),
        AttnChosen(_RUNS, 3, 1, 40, 24, 4, block=16, tail=True),
        AttnChosen(_LONG, 4, 1, 128, 128, k=129, n_splits=4),
        AttnChosen(((0, 40, 1),), 3, 1, 576, 512, 33, None, "f16", "f32"),
        AttnChosen(_LONG, 2, 1, 16, 24, 97, 2, "f32", "f16"),
        AttnChosen(_RUNS, 4, 2, 32, 96, 31, None, "q8_0", "q4_0"),
        AttnChosen(_RUNS, 12, 1, 32, 32, 32, None, "bf16", "q8_0"),
        AttnChosen(_RUNS, 5, 2, 32, 32, 20, None, "q4_0", "bf16", group=4, q_first=2),
        AttnChosenCoop(((0, 0, 1),), 1, 1, 16, 16, k=1),
        AttnChosenCoop(_RUNS, 8, 2, 64, 64, n_splits=3),
        AttnChosenCoop(_LONG, 6, 2, 32, 32, 5, 2, n_lists=2, block=7),
        AttnChosenCoop(_LONG, 20, 1, 48, 16, 9, block=4, tail=True),
        AttnChosenCoop(_RUNS, 4, 1, 96, 64, 4, None, "f32", "bf16", block=16, tail=True),
        AttnChosenCoop(_LONG, 4, 1, 128, 128, k=129, n_splits=4),
        AttnChosenCoop(((0, 40, 1),), 17, 1, 576, 512, 33),
        AttnChosenCoop(((0, 90, 1),), 8, 1, 576, 512, 70, 2, "q8_0", "q8_0"),
        AttnChosenCoop(_LONG, 33, 1, 64, 128, 97, 2, "q8_0", "f16"),
        AttnChosenCoop(_RUNS, 8, 2, 32, 96, 31, None, "q8_0", "q4_0"),
        AttnChosenCoop(_RUNS, 12, 1, 256, 256, 32, None, "bf16", "q8_0"),
        AttnChosenCoop(_RUNS, 5, 2, 32, 32, 20, None, "q4_0", "f32", group=4, q_first=2),
        AttnChosenCoop(_RUNS, 8, 2, 64, 64, 40, 2, "q5_1", "iq4_nl"),
        AttnChosenCoop(
            ((1, 25, 1), (2, 30, 9), (0, 0, 4)), 8, 2, 32, 32, 5, None, block=7, n_lists=2, dense=35
        ),
        AttnEntries(),
        AttnEntries(_RUNS, 6, 64, 12, 4, 5, 3, "f32"),
        AttnEntries(_LONG, 3, 32, 33, 16, 0, 2, "q8_0"),
        AttnEntries(_RUNS, 5, 32, 200, 1, 65, kind="q4_0", group=8, q_first=2),
        AttnEntries(((0, 300, 1),), 9, 512, 128, 4, 33, 2),
        AttnEntries(_LONG, 4, 40, 1, 128, kind="bf16"),
    ]


def wide() -> list[Case]:
    cases: list[Case] = []
    for k in (1, 31, 32, 33, 255, 256, 257):
        for nan in (False, True):
            cases += [IndexTopK(_LONG, k, values, nan) for values in (1, 9, 10**6)]
        cases.append(AttnChosen(_LONG, 8, 1, 192, 128, k, (None, 1, 5)[k % 3]))
    cases.append(IndexScores(_LONG, 64, 128))
    for kind in ("f32", "f16", "bf16", "q8_0", "q4_0"):
        cases += [IndexScores(_LONG, n, head, kind) for n in (1, 15, 33) for head in (32, 96)]
        cases += [
            IndexScoresCoop(_MANY, n, head, kind, tile_rows=n % 5) for n in (1, 15, 33) for head in (32, 96)
        ]
        for op in (AttnChosen, AttnChosenCoop):
            cases.append(replace(op(_LONG, 4, 2, 64, 32, 65), type_k=kind, type_v=kind))
    return cases


def bench() -> list[Case]:
    """Return the ops of a DeepSeek V3.2 layer at 16,384 positions on one of four devices."""
    runs = ((0, 16_383, 1),)
    return [
        IndexScores(runs, 64, 128),
        IndexScoresCoop(runs, 64, 128),
        IndexScoresCoop(runs, 64, 128, tile_rows=8),
        IndexTopK(runs, 2048),
        AttnChosen(runs, 32, 1, 576, 512, 2048, n_splits=8),
        AttnChosenCoop(runs, 32, 1, 576, 512, 2048, n_splits=8),
        AttnChosenCoop(runs, 16, 1, 128, 128, 16, n_splits=8, block=128),
    ]
