from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vkbackend.ops import Recorder
from vkbackend.tools.op_cases.setup import Case, Setup, Tensor, Views, output, uniform


@dataclass(frozen=True)
class StreamsOf(Case):
    n: int = 64
    rows: int = 3
    m: int = 4

    def setup(self, rng: np.random.Generator) -> Setup:
        a = uniform(rng, self.rows, self.m - 1, self.n)
        assert a.raw is not None
        a.raw *= np.exp2(rng.uniform(-6, 6, (self.rows, self.m - 1, 1))).astype(np.float32)
        a.raw[-1, -1] = 0
        tensors = {"x": uniform(rng, self.rows, self.n, span=3.0), "a": a}
        tensors["y"] = output(self.rows, self.m, self.n)
        return Setup(tensors, lambda r, v: r.streams_of(v["x"], v["a"], v["y"]))


@dataclass(frozen=True)
class StreamsPredict(Case):
    n: int = 64
    rows: int = 3
    m: int = 4
    scale: float = 1.0

    def inputs(self, rng: np.random.Generator) -> dict[str, Tensor]:
        routed = uniform(rng, self.rows, self.m, span=3.0 / self.scale)
        return {"x": uniform(rng, self.rows, self.m, self.n), "routed": routed}

    def setup(self, rng: np.random.Generator) -> Setup:
        tensors = self.inputs(rng) | {"w": uniform(rng, self.m**2, self.m)}
        tensors["y"] = output(self.rows, self.m, self.n)

        def record(r: Recorder, v: Views) -> None:
            r.streams_predict(v["x"], v["routed"], v["w"], v["y"], scale=self.scale)

        return Setup(tensors, record)


@dataclass(frozen=True)
class StreamsCorrect(StreamsPredict):
    def setup(self, rng: np.random.Generator) -> Setup:
        tensors = self.inputs(rng) | {
            "a": uniform(rng, self.rows, self.n),
            "w": uniform(rng, self.m, self.m),
            "g": uniform(rng, self.n),
            "y": output(self.rows, self.m, self.n),
            "z": output(self.rows, self.n),
        }

        def record(r: Recorder, v: Views) -> None:
            args = (v[name] for name in ("x", "a", "routed", "w", "g", "y", "z"))
            r.streams_correct(*args, scale=self.scale)

        return Setup(tensors, record)


@dataclass(frozen=True)
class StreamsAdd(Case):
    n: int = 64
    rows: int = 3
    m: int = 4

    def setup(self, rng: np.random.Generator) -> Setup:
        tensors = {"x": uniform(rng, self.rows, self.m, self.n), "a": uniform(rng, self.rows, self.n)}
        tensors["y"] = output(self.rows, self.m, self.n)
        return Setup(tensors, lambda r, v: r.streams_add(v["x"], v["a"], v["y"]))


@dataclass(frozen=True)
class StreamsMix(Case):
    n: int = 64
    rows: int = 3
    m: int = 4
    more: int = 0  # number of values per row of `mixes` that are not read

    def inputs(self, rng: np.random.Generator, width: int) -> dict[str, Tensor]:
        return {
            "x": uniform(rng, self.rows, self.m, self.n),
            "mixes": uniform(rng, self.rows, width, span=9.0),
            "scale": uniform(rng, 2),
            "base": uniform(rng, width),
        }

    def setup(self, rng: np.random.Generator) -> Setup:
        tensors = self.inputs(rng, self.m + self.more) | {"y": output(self.rows, self.n)}

        def record(r: Recorder, v: Views) -> None:
            r.streams_mix(*(v[name] for name in ("x", "mixes", "scale", "base", "y")), eps=1e-6)

        return Setup(tensors, record)


@dataclass(frozen=True)
class StreamsSpread(StreamsMix):
    def setup(self, rng: np.random.Generator) -> Setup:
        tensors = self.inputs(rng, 2 * self.m) | {"a": uniform(rng, self.rows, self.n)}
        tensors["y"] = output(self.rows, self.m, self.n)

        def record(r: Recorder, v: Views) -> None:
            args = (v[name] for name in ("x", "a", "mixes", "scale", "base", "y"))
            r.streams_spread(*args, gain=2.0, eps=1e-6)

        return Setup(tensors, record)


@dataclass(frozen=True)
class StreamsSinkhorn(StreamsMix):
    turns: int = 20

    def setup(self, rng: np.random.Generator) -> Setup:
        tensors = self.inputs(rng, (2 + self.m) * self.m) | {"a": uniform(rng, self.rows, self.n)}
        tensors |= {"scale": uniform(rng, 3), "y": output(self.rows, self.m, self.n)}

        def record(r: Recorder, v: Views) -> None:
            args = (v[name] for name in ("x", "a", "mixes", "scale", "base", "y"))
            r.streams_sinkhorn(*args, n_turns=self.turns, eps=1e-6)

        return Setup(tensors, record)


@dataclass(frozen=True)
class StreamsGate(Case):
    n: int = 64
    rows: int = 3
    m: int = 4

    def setup(self, rng: np.random.Generator) -> Setup:
        tensors = {name: uniform(rng, self.rows, self.m, self.n, span=3.0) for name in ("x", "k")}
        tensors |= {"a": uniform(rng, self.rows, self.n), "y": output(self.rows, self.m, self.n)}
        return Setup(tensors, lambda r, v: r.streams_gate(v["x"], v["k"], v["a"], v["y"]))


@dataclass(frozen=True)
class NgramIds(Case):
    """A third of the tokens ends a text. Factors have up to 62 bits."""

    exact: ClassVar[tuple[str, ...]] = ("ids",)
    rows: int = 5
    longest: int = 3
    n_heads: int = 8
    end: int = 7

    def setup(self, rng: np.random.Generator) -> Setup:
        tokens = rng.integers(0, 250_000, (self.rows, self.longest))
        tokens[rng.random(tokens.shape) < 1 / 3] = self.end
        factors = rng.integers(1 << 40, 1 << 62, self.longest, dtype=np.int64).astype("<u8").view("<u4")
        sizes = rng.integers(3, (1 << 31) - 1, self.n_heads).astype(np.uint32)
        offsets = rng.integers(0, 1 << 31, self.n_heads).astype(np.uint32)
        table = np.concatenate([factors, sizes, offsets])
        x = (tokens - self.end).astype(np.float32)
        tensors = {
            "x": Tensor(x.shape, "f32", x),
            "table": Tensor(table.shape, "u32", table),
            "ids": output(self.rows, self.n_heads, dtype="u32"),
        }
        return Setup(tensors, lambda r, v: r.ngram_ids(v["x"], v["table"], v["ids"], end=self.end))


@dataclass(frozen=True)
class StreamsAttend(Case):
    n: int = 64
    rows: int = 3
    m: int = 4

    def setup(self, rng: np.random.Generator) -> Setup:
        tensors = {
            "x": uniform(rng, self.rows, self.m, self.n, span=3.0),
            "a": uniform(rng, self.rows, self.n),
            "w": uniform(rng, self.n, span=0.5),
            "y": output(self.rows, self.n),
        }
        return Setup(tensors, lambda r, v: r.streams_attend(v["x"], v["a"], v["w"], v["y"], eps=1e-6))


@dataclass(frozen=True)
class RowMoments(Case):
    n: int = 64
    rows: int = 3

    def setup(self, rng: np.random.Generator) -> Setup:
        tensors = {"x": uniform(rng, self.rows, self.n), "y": output(self.rows, 2)}
        return Setup(tensors, lambda r, v: r.row_moments(v["x"], v["y"]))


@dataclass(frozen=True)
class Center(RowMoments):
    def setup(self, rng: np.random.Generator) -> Setup:
        tensors = {"x": uniform(rng, self.rows, self.n, span=9.0), "y": output(self.rows, self.n)}
        return Setup(tensors, lambda r, v: r.center(v["x"], v["y"]))


@dataclass(frozen=True)
class GaussianTopk(Case):
    n: int = 64
    width: int = 64
    rows: int = 3
    c: float = 1.0

    def setup(self, rng: np.random.Generator) -> Setup:
        x = uniform(rng, self.rows, self.width)
        assert x.raw is not None
        x.raw[-1] = 0.5
        moments = np.stack([x.raw.sum(axis=1), (x.raw * x.raw).sum(axis=1)], axis=1)
        tensors = {
            "x": Tensor((self.rows, self.n), "f32", x.raw[:, : self.n]),
            "moments": Tensor(moments.shape, "f32", moments),
            "y": output(self.rows, self.n),
        }

        def record(r: Recorder, v: Views) -> None:
            r.gaussian_topk(v["x"], v["moments"], v["y"], width=self.width, c=self.c)

        return Setup(tensors, record)


def quick() -> list[Case]:
    shapes = ((1, 1, 2), (33, 5, 4), (127, 2, 8))
    cases: list[Case] = [kind(*shape) for kind in (StreamsOf, StreamsAdd) for shape in shapes]
    for kind in (StreamsPredict, StreamsCorrect):
        cases += [kind(), kind(1, 1, 1, 0.25), kind(31, 5, 3), kind(65, 2, 8)]
    cases += [
        StreamsMix(),
        StreamsMix(127, 5, 3, 3),
        StreamsGate(),
        StreamsGate(131, 2, 3),
        NgramIds(),
        NgramIds(33, 4, 6, 249_999),
        StreamsSinkhorn(),
        StreamsSinkhorn(129, 2, 8, turns=3),
        StreamsSinkhorn(31, 1, 2, turns=1),
        StreamsSpread(),
        StreamsSpread(1, 1, 2),
    ]
    cases += [StreamsAttend(), StreamsAttend(1, 1, 1), StreamsAttend(131, 5, 9), StreamsAttend(7, 2, 40)]
    cases += [kind(*of) for kind in (Center, RowMoments) for of in ((64, 3), (2, 1), (1031, 5))]
    return [*cases, GaussianTopk(), GaussianTopk(1, 5, 1), GaussianTopk(130, 1030, 4, -0.5)]


def wide() -> list[Case]:
    cases: list[Case] = [StreamsOf(2048, rows) for rows in (1, 7)]
    cases += [kind(2048, rows, 4, 2.0**-11) for kind in (StreamsPredict, StreamsCorrect) for rows in (1, 7)]
    cases += [StreamsMix(2048, 7, 4, 4), StreamsSpread(2048, 7), StreamsAttend(2048, 7, 8)]
    return [*cases, StreamsAdd(2048, 7), RowMoments(16384, 2), GaussianTopk(8192, 16384, 3, 1.6449)]
