from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vkbackend.ops import Recorder
from vkbackend.tools.op_cases.recurrent import ROW_RUNS, RUNS, StateRun, n_rows_of, states, step_of, with_rows
from vkbackend.tools.op_cases.setup import Case, Setup, Tensor, Views, output, uniform


@dataclass(frozen=True)
class SsmScan(Case):
    """Heads have `p` values, and each value has a state of `n` values. `group` heads share B and C. Time
    steps include values x at which softplus(x) rounds to e^x or to x. Decays are at least e^-`span`."""

    n_heads: int = 4
    p: int = 16
    n: int = 16
    group: int = 2
    first: int = 0
    runs: tuple[StateRun, ...] = RUNS
    pad: int = 1
    span: float = 8.0

    def setup(self, rng: np.random.Generator) -> Setup:
        rows, heads, n_groups = n_rows_of(self.runs) + self.pad, self.n_heads, self.n_groups
        decay = -np.exp(rng.uniform(-4, 1, heads)).astype(np.float32)
        tensors = {
            "x": uniform(rng, rows, heads, self.p),
            "bc": uniform(rng, rows, 2, n_groups, self.n),
            "dt": uniform(rng, rows, heads, span=self.span),
            "bias": uniform(rng, heads),
            "a": Tensor((heads,), "f32", decay),
            "d": uniform(rng, heads),
            "state": states(rng, self.runs, heads, self.n, self.p),
            "y": output(rows, heads, self.p),
        }

        def record(r: Recorder, v: Views) -> None:
            names = ("x", "bc", "dt", "bias", "a", "d", "state", "y", "step")
            args = (v[name] for name in names)
            r.ssm_scan(*args, group=self.group, first=self.first, row_states=with_rows(self.runs))

        return Setup(tensors, record, step_of(rng, self.runs))

    @property
    def n_groups(self) -> int:
        return (self.first + self.n_heads - 1) // self.group + 1


@dataclass(frozen=True)
class SelectiveScan(Case):
    """Each channel has a state of `n` values. Time steps are as in SsmScan."""

    width: int = 32
    n: int = 16
    runs: tuple[StateRun, ...] = RUNS
    pad: int = 1
    span: float = 8.0

    def setup(self, rng: np.random.Generator) -> Setup:
        rows, width, n = n_rows_of(self.runs) + self.pad, self.width, self.n
        decay = -np.exp(rng.uniform(-4, 1, (width, n))).astype(np.float32)
        tensors = {
            "x": uniform(rng, rows, width),
            "dt": uniform(rng, rows, width, span=self.span),
            "b": uniform(rng, rows, n),
            "c": uniform(rng, rows, n),
            "a": Tensor((width, n), "f32", decay),
            "d": uniform(rng, width),
            "state": states(rng, self.runs, width, n),
            "y": output(rows, width),
        }

        def record(r: Recorder, v: Views) -> None:
            args = (v[name] for name in (*tensors, "step"))
            r.selective_scan(*args, row_states=with_rows(self.runs))

        return Setup(tensors, record, step_of(rng, self.runs))


@dataclass(frozen=True)
class GroupSquares(Case):
    width: int = 64
    group: int = 64
    n_groups: int = 1
    first: int = 0
    rows: int = 3
    gated: bool = True
    skip: int = 0

    def inputs(self, rng: np.random.Generator) -> dict[str, Tensor]:
        shape = self.rows, self.width
        return {"x": uniform(rng, *shape)} | ({"z": uniform(rng, *shape, span=9.0)} if self.gated else {})

    def setup(self, rng: np.random.Generator) -> Setup:
        tensors = self.inputs(rng) | {"squares": output(self.rows, self.n_groups)}

        def record(r: Recorder, v: Views) -> None:
            r.group_squares(
                v.get("z"), v["x"], v["squares"], group=self.group, first=self.first, skip=self.skip
            )

        return Setup(tensors, record)


@dataclass(frozen=True)
class GroupNorm(GroupSquares):
    in_place: bool = False

    def setup(self, rng: np.random.Generator) -> Setup:
        squares = rng.uniform(0.1, 2, (self.rows, self.n_groups)).astype(np.float32)
        known = {"squares": Tensor(squares.shape, "f32", squares), "w": uniform(rng, self.width)}
        tensors = self.inputs(rng) | known
        if self.in_place:
            tensors["x"].written = True
        else:
            tensors["y"] = output(self.rows, self.width)

        def record(r: Recorder, v: Views) -> None:
            y = v["x" if self.in_place else "y"]
            where: dict[str, Any] = {"group": self.group, "first": self.first}
            r.group_norm(v.get("z"), v["x"], v["squares"], v["w"], y, eps=1e-5, **where)

        return Setup(tensors, record)


_LONG: tuple[StateRun, ...] = ((7, 19, 1, 0), (0, 8, 2, 2))


def quick() -> list[Case]:
    return [
        SsmScan(),
        SsmScan(1, 8, 4, 1, 0, ((0, 1, 0, 0),), 0),
        SsmScan(3, 64, 128, 4, 2, _LONG, 3),
        SsmScan(2, 80, 32, 2, 0, ((9, 1, 0, 3),), 0),
        SsmScan(2, 8, 256, 1, 0, ((3, 9, 0, 1), (4, 1, 2, 2))),
        SsmScan(5, 24, 48, 3, 1, _LONG, 1, 60.0),
        SsmScan(3, 64, 128, 4, 2, ROW_RUNS, 3),
        SsmScan(2, 8, 256, 1, 0, ROW_RUNS),
        SelectiveScan(),
        SelectiveScan(67, 16, _LONG, 3),
        SelectiveScan(67, 64, ROW_RUNS, 3),
        GroupSquares(),
        GroupSquares(31, 16, 4, 17, 2),
        GroupSquares(1, 257, 1, 256, 5, gated=False),
        GroupSquares(513, 513, 1, gated=False, skip=300),
        GroupSquares(16, 64, 1, 32, 2, skip=16),
        GroupNorm(),
        GroupNorm(31, 16, 4, 17, 2),
        GroupNorm(257, 1024, 2, 1000, 2, gated=False, in_place=True),
    ]


def wide() -> list[Case]:
    cases: list[Case] = []
    for p, n, group in ((64, 128, 8), (64, 64, 8), (80, 128, 4), (128, 256, 8), (32, 16, 8)):
        for rows in (1, 7, 8, 9, 64, 127):
            for first in (0, 3):
                runs = ((3, rows, 1, 0), (0, 4, 2, 2))
                cases.append(SsmScan(8, p, n, group, first, runs))
    cases += [SelectiveScan(1, 4, ((0, 1, 0, 0),), 0), SelectiveScan(131, 8, _LONG, 1, 60.0)]
    cases.append(SelectiveScan(33, 256, ((3, 9, 0, 1), (4, 1, 2, 2))))
    for width, n in ((1536, 16), (4097, 16), (96, 64)):
        for rows in (1, 7, 8, 9, 127):
            cases.append(SelectiveScan(width, n, ((3, rows, 1, 0), (0, 4, 2, 2))))
    for width, group, n_groups in ((8192, 1024, 8), (3072, 3072, 1), (1536, 3072, 1)):
        for rows in (1, 5):
            shape = width, group, n_groups, n_groups * group - width, rows
            cases += [GroupSquares(*shape), GroupNorm(*shape)]
    return cases
