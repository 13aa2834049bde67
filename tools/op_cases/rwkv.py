from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vkbackend.ops import Recorder
from vkbackend.tools.op_cases.recurrent import ROW_RUNS, RUNS, StateRun, n_rows_of, states, step_of, with_rows
from vkbackend.tools.op_cases.setup import Case, Setup, Tensor, Views, output, uniform


@dataclass(frozen=True)
class TokenShift(Case):
    """The last `pad` rows belong to no run."""

    width: int = 64
    n: int = 6
    runs: tuple[StateRun, ...] = RUNS
    pad: int = 1

    def setup(self, rng: np.random.Generator) -> Setup:
        rows = n_rows_of(self.runs) + self.pad
        tensors = {
            "x": uniform(rng, rows, self.width),
            "mu": uniform(rng, self.n, self.width),
            "state": states(rng, self.runs, self.width),
            "y": output(self.n, rows, self.width),
        }

        def record(r: Recorder, v: Views) -> None:
            args = (v[name] for name in (*tensors, "step"))
            r.token_shift(*args, row_states=with_rows(self.runs))

        return Setup(tensors, record, step_of(rng, self.runs))


@dataclass(frozen=True)
class WkvKeys(Case):
    """Some rates have a sigmoid of 0 or 1. In row 0, the first head contains only zeros."""

    size: int = 64
    n_heads: int = 2
    rows: int = 3

    def setup(self, rng: np.random.Generator) -> Setup:
        shape, width = (self.rows, self.n_heads, self.size), self.n_heads * self.size
        k = uniform(rng, *shape)
        assert k.raw is not None
        k.raw[0, 0] = 0
        tensors = {
            "k": k,
            "rate": uniform(rng, *shape, span=100.0),
            "removal": uniform(rng, width),
            "replacement": uniform(rng, width),
            **{name: output(*shape) for name in ("key", "removed", "added")},
        }

        def record(r: Recorder, v: Views) -> None:
            r.wkv_keys(*(v[name] for name in tensors))

        return Setup(tensors, record)


@dataclass(frozen=True)
class Wkv(Case):
    """Removed keys have length 1, as wkv_keys makes them."""

    tolerance: ClassVar[float] = 1e-9
    size: int = 16
    n_heads: int = 2
    runs: tuple[StateRun, ...] = RUNS
    pad: int = 1

    def setup(self, rng: np.random.Generator) -> Setup:
        shape = n_rows_of(self.runs) + self.pad, self.n_heads, self.size
        removed = rng.uniform(-1, 1, shape).astype(np.float32)
        removed /= np.sqrt((removed * removed).sum(axis=2, keepdims=True))
        added = removed * rng.uniform(0, 1, shape).astype(np.float32)
        tensors = {
            "r": uniform(rng, *shape),
            "decay": uniform(rng, *shape, span=9.0),
            "key": uniform(rng, *shape),
            "v": uniform(rng, *shape),
            "removed": Tensor(shape, "f32", removed),
            "added": Tensor(shape, "f32", added),
            "state": states(rng, self.runs, self.n_heads, self.size, self.size),
            "y": output(*shape),
        }

        def record(r: Recorder, v: Views) -> None:
            r.wkv(*(v[name] for name in (*tensors, "step")), row_states=with_rows(self.runs))

        return Setup(tensors, record, step_of(rng, self.runs))


@dataclass(frozen=True)
class WkvNorm(Case):
    size: int = 64
    n_heads: int = 2
    rows: int = 3

    def setup(self, rng: np.random.Generator) -> Setup:
        shape, width = (self.rows, self.n_heads, self.size), self.n_heads * self.size
        tensors = {name: uniform(rng, *shape) for name in ("x", "r", "key", "v")}
        tensors |= {name: uniform(rng, width) for name in ("bonus", "w", "b")}
        tensors["y"] = output(*shape)

        def record(r: Recorder, v: Views) -> None:
            r.wkv_norm(*(v[name] for name in tensors), eps=64e-5)

        return Setup(tensors, record)


_LONG: tuple[StateRun, ...] = ((7, 19, 1, 0), (0, 8, 2, 2))


def quick() -> list[Case]:
    return [
        TokenShift(),
        TokenShift(1, 1, ((0, 1, 0, 0),), 0),
        TokenShift(67, 1, _LONG, 3),
        TokenShift(33, 6, ROW_RUNS),
        WkvKeys(),
        WkvKeys(1, 1, 1),
        WkvKeys(40, 3, 5),
        Wkv(),
        Wkv(24, 3, _LONG, 3),
        Wkv(64, 2, ROW_RUNS),
        WkvNorm(),
        WkvNorm(1, 1, 1),
        WkvNorm(40, 3, 5),
    ]


def wide() -> list[Case]:
    cases: list[Case] = [Wkv(64, 12, ((3, rows, 1, 0), (0, 4, 2, 2))) for rows in (1, 7, 8, 9, 127)]
    cases += [Wkv(4, 1, ((0, 1, 0, 0),), 0), Wkv(128, 1, ((3, 9, 0, 1), (4, 1, 2, 2)))]
    return [
        *cases,
        TokenShift(768, 6, ((3, 127, 1, 0), (0, 4, 2, 2))),
        WkvKeys(64, 12, 31),
        WkvNorm(64, 12, 31),
    ]
