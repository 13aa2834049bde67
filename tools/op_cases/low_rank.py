from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from vkbackend.ops import NO_ADAPTER, Recorder
from vkbackend.tools.op_cases.setup import Case, Setup, Tensor, Views, output, uniform, weights


@dataclass(frozen=True)
class LowRankAdd(Case):
    """If `widths` is set, B is a stack in `pieces` bindings, in which id e has widths[e] rows. Then the last
    `n_terms` columns of the scales are used. Otherwise B is [n, n_adapters * rank]. t is NaN in rows without
    an adapter, and y is NaN past an id's rows. `pad` is added to the stride of y, and `t_pad` to the stride
    of t. The padding of t is NaN."""

    tolerance: ClassVar[float] = 1e-9
    type: str = "f32"
    n: int = 64
    rank: int = 8
    n_adapters: int = 2
    n_terms: int = 1
    rows: int = 1
    in_place: bool = True
    pad: int = 0
    t_pad: int = 0
    widths: tuple[int, ...] = ()
    used: int = 1
    per_row: int = 1
    pieces: int = 1

    def setup(self, rng: np.random.Generator) -> Setup:
        return self._stacked(rng) if self.widths else self._dense(rng)

    def _dense(self, rng: np.random.Generator) -> Setup:
        ids, t = self._ids(rng, self.n_adapters, self.rows)
        x = uniform(rng, self.rows, self.n + self.pad)
        x.written = self.in_place
        tensors = {
            "b": weights(rng, self.type, self.n, self.n_adapters * self.rank),
            "t": t,
            "ids": ids,
            "scales": uniform(rng, self.rows, self.n_terms, span=2.0),
            "x": x,
        }
        if not self.in_place:
            tensors["y"] = output(self.rows, self.n + self.pad)

        def record(r: Recorder, v: Views) -> None:
            y = v["x" if self.in_place else "y"]
            wider: dict[str, Any] = {"n": self.n, "rank": self.rank, "t_stride": self.rank + self.t_pad}
            r.low_rank_add(v["b"], v["t"], v["ids"], v["scales"], v["x"], y, **wider)

        return Setup(tensors, record)

    def _stacked(self, rng: np.random.Generator) -> Setup:
        n_ids, widest = len(self.widths), max(self.widths)
        starts = np.concatenate([[0], np.cumsum(self.widths)]).astype(np.uint32)
        ids, t = self._ids(rng, n_ids, self.rows * self.used)
        assert ids.raw is not None
        y = rng.uniform(-1, 1, (self.rows * self.used, widest)).astype(np.float32)
        has = np.array([*self.widths, 0])[np.minimum(ids.raw, n_ids)]
        y[np.arange(widest) >= has] = np.nan
        tensors = {
            "t": t,
            "ids": ids,
            "scales": uniform(rng, self.rows, self.per_row, span=2.0),
            "starts": Tensor(starts.shape, "u32", starts),
            "y": Tensor(y.shape, "f32", y, written=True),
        }
        bounds = np.linspace(0, n_ids, self.pieces + 1).astype(int).tolist()
        for i, (first, end) in enumerate(pairwise(bounds)):
            tensors[f"b{i}"] = weights(rng, self.type, int(starts[end] - starts[first]), self.rank)

        def record(r: Recorder, v: Views) -> None:
            for i, (first, end) in enumerate(pairwise(bounds)):
                r.low_rank_add(
                    v[f"b{i}"],
                    v["t"],
                    v["ids"],
                    v["scales"],
                    v["y"],
                    v["y"],
                    n=widest,
                    starts=v["starts"],
                    n_used=self.used,
                    s_first=self.per_row - 1,
                    first=first,
                    count=end - first,
                )

        return Setup(tensors, record)

    def _ids(self, rng: np.random.Generator, n: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return ids and t. About a third of the ids are NO_ADAPTER."""
        ids = rng.integers(0, n, (rows, self.n_terms)).astype(np.uint32)
        ids[rng.random(ids.shape) < 1 / 3] = NO_ADAPTER
        t = rng.uniform(-1, 1, (*ids.shape, self.rank + self.t_pad)).astype(np.float32)
        t[ids == NO_ADAPTER] = np.nan
        t[..., self.rank :] = np.nan
        return Tensor(ids.shape, "u32", ids), Tensor(t.shape, "f32", t)


@dataclass(frozen=True)
class AdapterExperts(Case):
    tolerance: ClassVar[float] = 0.0
    rows: int = 1
    used: int = 1
    n_terms: int = 1
    n_experts: int = 1

    def setup(self, rng: np.random.Generator) -> Setup:
        adapters = rng.integers(0, 7, (self.rows, self.n_terms)).astype(np.uint32)
        adapters[rng.random(adapters.shape) < 1 / 3] = NO_ADAPTER
        experts = rng.integers(0, self.n_experts, (self.rows, self.used)).astype(np.uint32)
        tensors = {
            "adapters": Tensor(adapters.shape, "u32", adapters),
            "experts": Tensor(experts.shape, "u32", experts),
            "ids": output(self.rows, self.used, dtype="u32"),
        }

        def record(r: Recorder, v: Views) -> None:
            args = v["adapters"], v["experts"], v["ids"]
            r.adapter_experts(*args, term=self.n_terms - 1, n_experts=self.n_experts)

        return Setup(tensors, record)


def quick() -> list[Case]:
    return [
        AdapterExperts(),
        AdapterExperts(37, 4, 2, 60),
        LowRankAdd(n=1, rank=1, n_adapters=1),
        LowRankAdd(n=33, rank=5, n_adapters=3, n_terms=4, rows=7, pad=3),
        LowRankAdd("f16", 257, 16, 2, 2, 9, in_place=False),
        LowRankAdd("bf16", 64, 6, 3, 2, 5, t_pad=7),
        LowRankAdd(n=65, rows=1, t_pad=16),
        LowRankAdd(rank=4, rows=3, widths=(32, 0, 17), used=2),
        LowRankAdd("f16", rank=3, rows=5, widths=(5, 0, 31, 2), used=3, per_row=4, pieces=2),
    ]


def wide() -> list[Case]:
    kinds = ("f32", "f16", "bf16")
    cases: list[Case] = [
        LowRankAdd(kind, n, rank, adapters, terms, rows)
        for kind in kinds
        for n, rank in ((1, 1), (31, 3), (128, 64), (4096, 16), (1031, 7))
        for adapters, terms in ((1, 1), (3, 2), (8, 4))
        for rows in (1, 4, 65)
    ]
    cases += [
        LowRankAdd(kind, rank=rank, rows=rows, widths=widths, used=used, per_row=per_row, pieces=pieces)
        for kind in kinds
        for widths in ((64,) * 8, (7, 0, 96, 33))
        for rank in (1, 16)
        for rows, used, per_row in ((1, 2, 1), (37, 4, 4))
        for pieces in (1, 2)
    ]
    return cases
