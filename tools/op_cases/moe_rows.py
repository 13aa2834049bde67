"""Cases of the ops that group, weight and sum the rows of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vkbackend import ops
from vkbackend.ops import Recorder
from vkbackend.tools.op_cases.setup import Case, Setup, Tensor, Views, output, uniform


@dataclass(frozen=True)
class MoeGroup(Case):
    tolerance: ClassVar[float] = 0.0
    n_experts: int = 4
    used: int = 2
    rows: int = 5
    tile: int = 3

    def setup(self, rng: np.random.Generator) -> Setup:
        n_pairs = self.rows * self.used
        ids = rng.integers(0, self.n_experts, (self.rows, self.used)).astype(np.uint32)
        ids[rng.random(ids.shape) < 0.3] = self.n_experts - 1
        tensors = {
            "ids": Tensor(ids.shape, "u32", ids),
            "order": output(n_pairs, dtype="u32"),
            "tiles": output(ops.tile_count(n_pairs, self.n_experts, self.tile), 3, dtype="u32"),
        }

        def record(r: Recorder, v: Views) -> None:
            groups = ops.Groups(v["order"], v["tiles"], self.tile)
            r.moe_group(v["ids"], groups, n_experts=self.n_experts)

        return Setup(tensors, record)


@dataclass(frozen=True)
class AddId(Case):
    widths: tuple[int, ...] = (32, 32)
    used: int = 2
    rows: int = 1
    ragged: bool = True

    def setup(self, rng: np.random.Generator) -> Setup:
        n, n_experts = max(self.widths), len(self.widths)
        ids = np.stack([rng.permutation(n_experts)[: self.used] for _ in range(self.rows)]).astype(np.uint32)
        x = rng.uniform(-1, 1, (self.rows, self.used, n)).astype(np.float32)
        x[np.arange(n) >= np.array(self.widths)[ids][..., None]] = np.nan
        starts = np.concatenate([[0], np.cumsum(self.widths)]).astype(np.uint32)
        tensors = {
            "x": Tensor(x.shape, "f32", x, written=True),
            "b": uniform(rng, sum(self.widths)) if self.ragged else uniform(rng, n_experts, n),
            "ids": Tensor(ids.shape, "u32", ids),
            "starts": Tensor(starts.shape, "u32", starts),
        }

        def record(r: Recorder, v: Views) -> None:
            starts = v["starts"] if self.ragged else None
            r.add_id(v["x"], v["b"], v["ids"], v["x"], starts=starts)

        return Setup(tensors, record)


@dataclass(frozen=True)
class GateRows(Case):
    n: int = 64
    rows: int = 1
    softplus: bool = False

    def setup(self, rng: np.random.Generator) -> Setup:
        gate = rng.uniform(-9, 9, self.rows).astype(np.float32)
        gate[1:2] = -200.0
        tensors = {
            "gate": Tensor(gate.shape, "f32", gate),
            "x": uniform(rng, self.rows, self.n),
            "y": output(self.rows, self.n),
        }
        return Setup(tensors, lambda r, v: r.gate_rows(v["gate"], v["x"], v["y"], softplus=self.softplus))


@dataclass(frozen=True)
class MoeSum(Case):
    n: int = 64
    used: int = 2
    rows: int = 1

    def setup(self, rng: np.random.Generator) -> Setup:
        tensors = {
            "x": uniform(rng, self.rows, self.used, self.n),
            "weights": uniform(rng, self.rows, self.used),
            "y": output(self.rows, self.n),
        }
        return Setup(tensors, lambda r, v: r.moe_sum(v["x"], v["weights"], v["y"]))


def quick() -> list[Case]:
    return [
        MoeGroup(),
        MoeGroup(1, 1, 1, 8),
        MoeGroup(300, 7, 130, 16),
        AddId(),
        AddId((5, 0, 31, 2), 3, 4),
        AddId((129,) * 4, 4, 5, ragged=False),
        GateRows(),
        GateRows(129, 3),
        GateRows(1, 127, softplus=True),
        MoeSum(),
        MoeSum(1, 1, 2),
        MoeSum(257, 7, 5),
    ]


def wide() -> list[Case]:
    return [
        AddId((n,) * 8, used, rows, r)
        for n in (32, 129)
        for used in (1, 4)
        for rows in (1, 129)
        for r in (False, True)
    ]
