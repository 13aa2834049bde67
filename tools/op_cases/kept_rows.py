from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vkbackend.tools.op_cases.setup import Case, RunSpec, Setup, output, step_of, uniform


@dataclass(frozen=True)
class RowsBefore(Case):
    """`padded` rows of x and y follow the step's rows."""

    tolerance: ClassVar[float] = 0.0
    n: int = 64
    runs: tuple[RunSpec, ...] = ((0, 5, 1),)
    n_kept: int = 4
    padded: int = 0
    has_x: bool = True

    def setup(self, rng: np.random.Generator) -> Setup:
        rows = sum(n for _, _, n in self.runs) + self.padded
        n_slots = 1 + max(slot for slot, _, _ in self.runs)
        tensors = {"kept": uniform(rng, n_slots, self.n_kept, self.n), "y": output(rows, self.n)}
        if self.has_x:
            tensors["x"] = uniform(rng, rows, self.n)
        step = step_of(rng, self.runs)
        return Setup(tensors, lambda r, v: r.rows_before(v.get("x"), v["kept"], v["y"], v["step"]), step)


@dataclass(frozen=True)
class KeepRows(Case):
    tolerance: ClassVar[float] = 0.0
    n: int = 64
    runs: tuple[RunSpec, ...] = ((0, 5, 1),)
    n_kept: int = 4
    padded: int = 0

    def setup(self, rng: np.random.Generator) -> Setup:
        rows = sum(n for _, _, n in self.runs) + self.padded
        kept = uniform(rng, 1 + max(slot for slot, _, _ in self.runs), self.n_kept, self.n)
        kept.written = True
        step = step_of(rng, self.runs)
        tensors = {"x": uniform(rng, rows, self.n), "kept": kept}
        return Setup(tensors, lambda r, v: r.keep_rows(v["x"], v["kept"], v["step"]), step)


def quick() -> list[Case]:
    mixed = (2, 7, 1), (0, 0, 5), (1, 3, 9)
    return [
        RowsBefore(),
        RowsBefore(65, mixed, 4, padded=1),
        RowsBefore(33, ((1, 16, 1), (0, 0, 1), (2, 1, 1)), 16, padded=1, has_x=False),
        KeepRows(),
        KeepRows(65, mixed, 4, padded=1),
        KeepRows(129, ((1, 30, 17), (0, 2, 3)), 16),
    ]
