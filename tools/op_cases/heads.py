from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vkbackend.ops import Recorder
from vkbackend.tools.op_cases.setup import Case, Setup, Views, output, uniform, weights


@dataclass(frozen=True)
class MatHeads(Case):
    tolerance: ClassVar[float] = 1e-9
    type: str = "f32"
    n_heads: int = 3
    n: int = 5
    k: int = 32
    rows: int = 1

    def setup(self, rng: np.random.Generator) -> Setup:
        tensors = {
            "w": weights(rng, self.type, self.n_heads * self.n, self.k),
            "x": uniform(rng, self.rows, self.n_heads, self.k),
            "y": output(self.rows, self.n_heads, self.n),
        }

        def record(r: Recorder, v: Views) -> None:
            r.mat_heads(v["w"], v["x"], v["y"], n_heads=self.n_heads)

        return Setup(tensors, record)


@dataclass(frozen=True)
class Concat(Case):
    tolerance: ClassVar[float] = 0.0
    n_a: int = 32
    n_b: int = 8
    rows: int = 3
    times: int = 1

    def setup(self, rng: np.random.Generator) -> Setup:
        tensors = {
            "a": uniform(rng, self.rows, self.n_a),
            "b": uniform(rng, self.rows // self.times, self.n_b),
            "y": output(self.rows, self.n_a + self.n_b),
        }
        return Setup(tensors, lambda r, v: r.concat(v["a"], v["b"], v["y"]))


def quick() -> list[Case]:
    return [
        MatHeads("f32", 4, 33, 31, 9),
        MatHeads("f16", 2, 64, 128, 3),
        MatHeads("q8_0", 5, 40, 96, 17),
        Concat(),
        Concat(512, 64, 5),
        Concat(33, 9, 12, times=4),
        Concat(1, 1, 1),
    ]


def case_of(kind: str, k: int) -> Case:
    return MatHeads(kind, 2, 3, k)
