from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from vkbackend.buffer import View
from vkbackend.limits import Limits
from vkbackend.ops import OPS, Recorder
from vkbackend.ops.attention_tiles import blocks_cut, tile_of_chosen
from vkbackend.step import Mix
from vkbackend.tools.op_cases.indexer import LONG, RUNS, cache_of_blocks
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

# Tiles of several rows begin at rows 0, 4 and 8 and at the runs' first rows. Rows cross borders of blocks.
_PROMPTS = ((1, 290, 3), (0, 125, 7), (2, 0, 1), (3, 30, 6))


@dataclass(frozen=True)
class AttnChosen(Case):
    """Each row attends to its own list of chosen positions. Unused entries at the list's end are invalid
    positions. Rows at positions below `dense` do not change."""

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
            args = tuple(v[name] for name in ("q", "k", "v", "cells", "chosen", "y", "step"))
            how: dict[str, Any] = {"block": self.block, "tail": self.tail, "scale": self.head_k**-0.5}
            how |= {"group": self.group or self.n_heads // self.n_kv, "q_first": self.q_first}
            self.attend(r, args, how)

        return Setup(tensors, record, step)

    def attend(self, r: Recorder, args: tuple[View, ...], how: dict[str, Any]) -> None:
        r.attn_chosen(*args, **how)

    def parts(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        return split_parts(array, self.head_v) if self.n_splits else {name: array}


@dataclass(frozen=True)
class AttnChosenCoop(AttnChosen):
    """The rounding errors are the same as in AttnDecodeCoop."""

    tolerance: ClassVar[float] = 4e-6

    @property
    def needs(self) -> tuple[str, ...]:
        return OPS["attn_chosen_coop"].needs

    def fits(self, limits: Limits) -> bool:
        group = self.group or self.n_heads // self.n_kv
        return tile_of_chosen(limits, group, self.head_k, self.head_v) is not None

    def attend(self, r: Recorder, args: tuple[View, ...], how: dict[str, Any]) -> None:
        r.attn_chosen_coop(*args, dense=self.dense, **how)


@dataclass(frozen=True)
class AttnBlocksCoop(AttnChosenCoop):
    """With `together`, rows share tiles. Rows of the other kind than `joint` selects do not change."""

    joint: int = 0
    together: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        return OPS["attn_blocks_coop"].needs

    def fits(self, limits: Limits) -> bool:
        group = self.group or self.n_heads // self.n_kv
        how = self.block, self.together
        return blocks_cut(limits, group, self.head_k, self.head_v, *how) is not None

    def attend(self, r: Recorder, args: tuple[View, ...], how: dict[str, Any]) -> None:
        r.attn_blocks_coop(*args, joint=self.joint, together=self.together, **how)


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


def quick() -> list[Case]:
    return [
        AttnChosen(((0, 0, 1),), 1, 1, 8, 8, k=1),
        AttnChosen(RUNS, 6, 2, 64, 64, n_splits=3),
        AttnChosen(LONG, 6, 2, 32, 32, 5, 2, n_lists=2, block=7),
        AttnChosen(LONG, 4, 2, 16, 16, 9, block=4, tail=True),
        AttnChosen(RUNS, 3, 1, 40, 24, 4, block=16, tail=True),
        AttnChosen(LONG, 4, 1, 128, 128, k=129, n_splits=4),
        AttnChosen(((0, 40, 1),), 3, 1, 576, 512, 33, None, "f16", "f32"),
        AttnChosen(LONG, 2, 1, 16, 24, 97, 2, "f32", "f16"),
        AttnChosen(RUNS, 4, 2, 32, 96, 31, None, "q8_0", "q4_0"),
        AttnChosen(RUNS, 12, 1, 32, 32, 32, None, "bf16", "q8_0"),
        AttnChosen(RUNS, 5, 2, 32, 32, 20, None, "q4_0", "bf16", group=4, q_first=2),
        AttnChosenCoop(((0, 0, 1),), 1, 1, 16, 16, k=1),
        AttnChosenCoop(RUNS, 8, 2, 64, 64, n_splits=3),
        AttnChosenCoop(LONG, 6, 2, 32, 32, 5, 2, n_lists=2, block=7),
        AttnChosenCoop(LONG, 20, 1, 48, 16, 9, block=4, tail=True),
        AttnChosenCoop(RUNS, 4, 1, 96, 64, 4, None, "f32", "bf16", block=16, tail=True),
        AttnChosenCoop(LONG, 4, 1, 128, 128, k=129, n_splits=4),
        AttnChosenCoop(((0, 40, 1),), 17, 1, 576, 512, 33),
        AttnChosenCoop(((0, 90, 1),), 8, 1, 576, 512, 70, 2, "q8_0", "q8_0"),
        AttnChosenCoop(LONG, 33, 1, 64, 128, 97, 2, "q8_0", "f16"),
        AttnChosenCoop(RUNS, 8, 2, 32, 96, 31, None, "q8_0", "q4_0"),
        AttnChosenCoop(RUNS, 12, 1, 256, 256, 32, None, "bf16", "q8_0"),
        AttnChosenCoop(RUNS, 5, 2, 32, 32, 20, None, "q4_0", "f32", group=4, q_first=2),
        AttnChosenCoop(RUNS, 8, 2, 64, 64, 40, 2, "q5_1", "iq4_nl"),
        AttnChosenCoop(
            ((1, 25, 1), (2, 30, 9), (0, 0, 4)), 8, 2, 32, 32, 5, None, block=7, n_lists=2, dense=35
        ),
        AttnBlocksCoop(((0, 0, 1),), 4, 1, 16, 16, 1, block=32),
        AttnBlocksCoop(LONG, 6, 2, 32, 32, 3, 2, n_lists=2, block=64),
        AttnBlocksCoop(_PROMPTS, 8, 2, 32, 48, 4, None, "q8_0", "f16", n_lists=2, block=32, joint=200),
        AttnBlocksCoop(_PROMPTS, 8, 2, 64, 32, 3, n_lists=2, block=32, joint=300, together=True),
        AttnBlocksCoop(_PROMPTS, 5, 2, 32, 16, 2, None, "bf16", "f32", 4, 2, 2, 64, joint=250, together=True),
        AttnBlocksCoop(
            _PROMPTS, 4, 1, 128, 128, 4, None, "q8_0", "q8_0", block=96, tail=True, joint=999, together=True
        ),
        AttnEntries(),
        AttnEntries(RUNS, 6, 64, 12, 4, 5, 3, "f32"),
        AttnEntries(LONG, 3, 32, 33, 16, 0, 2, "q8_0"),
        AttnEntries(RUNS, 5, 32, 200, 1, 65, kind="q4_0", group=8, q_first=2),
        AttnEntries(((0, 300, 1),), 9, 512, 128, 4, 33, 2),
        AttnEntries(LONG, 4, 40, 1, 128, kind="bf16"),
    ]


def wide() -> list[Case]:
    cases: list[Case] = [
        AttnChosen(LONG, 8, 1, 192, 128, k, (None, 1, 5)[k % 3]) for k in (1, 31, 32, 33, 255, 256, 257)
    ]
    for kind in ("f32", "f16", "bf16", "q8_0", "q4_0"):
        for op in (AttnChosen, AttnChosenCoop):
            cases.append(replace(op(LONG, 4, 2, 64, 32, 65), type_k=kind, type_v=kind))
        for k, joint in ((1, 0), (3, 170), (5, 1024)):
            blocks = AttnBlocksCoop(
                _PROMPTS, 16, 2, 64, 32, k, None, kind, kind, n_lists=2, block=32, joint=joint
            )
            cases += [blocks, *([replace(blocks, together=True)] if joint else [])]
    return cases


def bench() -> list[Case]:
    """Return the ops of a DeepSeek V3.2 layer at 16,384 positions on one of four devices."""
    runs = ((0, 16_383, 1),)
    return [
        AttnChosen(runs, 32, 1, 576, 512, 2048, n_splits=8),
        AttnChosenCoop(runs, 32, 1, 576, 512, 2048, n_splits=8),
        AttnBlocksCoop(runs, 16, 1, 128, 128, 16, n_splits=8, block=128),
        AttnBlocksCoop(((0, 3_488, 96),), 16, 1, 128, 128, 16, block=128, joint=3_584, together=True),
    ]
