from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vkbackend.ops import Recorder
from vkbackend.ops.expert_cache import NONE
from vkbackend.tools.op_cases.setup import Case, Setup, Tensor, Views, output, step_of


@dataclass(frozen=True)
class MoeLookup(Case):
    """`cached` experts have slots, and their ids are `stride` apart. `padded` rows of ids follow the step's
    rows. If `invalid` is set, some ids are not experts."""

    tolerance: ClassVar[float] = 0.0
    n_experts: int = 8
    used: int = 2
    rows: int = 3
    cached: int = 3
    padded: int = 0
    stride: int = 1
    counted: bool = True
    invalid: bool = False

    def setup(self, rng: np.random.Generator) -> Setup:
        shape = self.rows + self.padded, self.used
        ids = np.stack([rng.permutation(self.n_experts)[: self.used] for _ in range(shape[0])])
        if self.invalid:
            ids[::2, 0] = rng.choice([self.n_experts, NONE], len(ids[::2]))
        table = np.full(self.n_experts, NONE, np.uint32)
        table[rng.permutation(self.n_experts)[: self.cached]] = self.stride * rng.permutation(self.cached)
        tensors = {
            "ids": Tensor(shape, "u32", ids.astype(np.uint32)),
            "table": Tensor(table.shape, "u32", table),
            "misses": output(*shape, dtype="u32"),
            "hits": output(*shape, dtype="u32"),
        }
        if self.counted:
            tensors["counts"] = output(self.n_experts, dtype="u32")

        def record(r: Recorder, v: Views) -> None:
            r.moe_lookup(v["ids"], v["table"], v["misses"], v["hits"], v["step"], v.get("counts"))

        return Setup(tensors, record, step_of(rng, ((0, 5, self.rows),)))


def quick() -> list[Case]:
    return [
        MoeLookup(),
        MoeLookup(1, 1, 1, 1),
        MoeLookup(1, 1, 1, 0, counted=False),
        MoeLookup(60, 4, 33, 20, padded=15, stride=2),
        MoeLookup(128, 8, 20, 127, invalid=True),
        MoeLookup(1023, 32, 9, 300, padded=3),
        MoeLookup(32, 4, 70, 32, padded=26, counted=False),
    ]
