from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vkbackend import ops
from vkbackend.ops import Recorder
from vkbackend.tools.op_cases.setup import (
    Q8_FLIP,
    Case,
    Setup,
    Tensor,
    Views,
    as_numbers,
    cos_sin_of,
    output,
    step_of,
    uniform,
    weights,
)


@dataclass(frozen=True)
class Embed(Case):
    """The embedding table has `pieces` bindings. `used` of the `rows` output rows are filled. One token id is
    out of range."""

    tolerance: ClassVar[float] = 1e-12
    type: str = "f32"
    n_embd: int = 64
    n_vocab: int = 13
    rows: int = 5
    used: int = 3
    ids: int = ops.TOKENS
    pieces: int = 1

    def setup(self, rng: np.random.Generator) -> Setup:
        by_output = self.ids == ops.OUTPUTS
        outputs = tuple(rng.integers(0, self.n_vocab, self.used)) if by_output else ()
        step = step_of(rng, ((0, 5, self.n_vocab if by_output else self.used),), self.n_vocab, outputs)
        if self.ids == ops.TOKENS:
            step.rows[self.used - 1, 2] = self.n_vocab
        if self.ids == ops.TYPES:
            step.types[: self.used] = rng.integers(0, self.n_vocab, self.used)
        bounds = np.linspace(0, self.n_vocab, self.pieces + 1).astype(int)
        table = {
            f"w{i}": weights(rng, self.type, int(bounds[i + 1] - bounds[i]), self.n_embd)
            for i in range(self.pieces)
        }

        def record(r: Recorder, v: Views) -> None:
            for i, first in enumerate(bounds[:-1]):
                r.embed(v[f"w{i}"], v["y"], v["step"], ids=self.ids, first=int(first))

        return Setup({**table, "y": output(self.rows, self.n_embd)}, record, step)


@dataclass(frozen=True)
class RmsNorm(Case):
    n: int = 64
    rows: int = 1
    has_w: bool = True
    out: str = "f32"

    def parts(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        return {name: as_numbers(array, self.n)}

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        return Q8_FLIP if self.out == "q8" else 1e-10

    def setup(self, rng: np.random.Generator) -> Setup:
        tensors = {"x": uniform(rng, self.rows, self.n), "y": output(self.rows, self.n, dtype=self.out)}
        if self.has_w:
            tensors["w"] = uniform(rng, self.n)
        return Setup(
            tensors,
            lambda r, v: r.rms_norm(v["x"], v.get("w"), v["y"], eps=1e-5),
        )


@dataclass(frozen=True)
class LayerNorm(Case):
    tolerance: ClassVar[float] = 1e-9
    n: int = 64
    rows: int = 1
    has_b: bool = True
    mean: float = 10.0

    def setup(self, rng: np.random.Generator) -> Setup:
        x = (rng.uniform(-1, 1, (self.rows, self.n)) + self.mean).astype(np.float32)
        tensors = {"x": Tensor(x.shape, "f32", x), "w": uniform(rng, self.n), "y": output(self.rows, self.n)}
        if self.has_b:
            tensors["b"] = uniform(rng, self.n)
        return Setup(tensors, lambda r, v: r.layer_norm(v["x"], v["w"], v.get("b"), v["y"], eps=1e-5))


@dataclass(frozen=True)
class Rope(Case):
    n_heads: int = 2
    head_dim: int = 16
    n_rot: int = 16
    rows: int = 3
    half_split: bool = False
    in_place: bool = False
    norm: str = ""  # "plain", "weighted"
    n_parts: int = 1

    def setup(self, rng: np.random.Generator) -> Setup:
        x = uniform(rng, self.rows, self.n_heads, self.head_dim)
        tensors = {"x": x, "cos_sin": cos_sin_of(rng, self.rows, self.n_rot)}
        if self.norm == "weighted":
            tensors["w"] = uniform(rng, self.head_dim)
        x.written = self.in_place
        if not self.in_place:
            tensors["y"] = output(*x.shape)

        def record(r: Recorder, v: Views) -> None:
            y = v["x"] if self.in_place else v["y"]
            norm = ops.HeadNorm(v.get("w"), 1e-5) if self.norm else None
            r.rope(v["x"], v["cos_sin"], y, half_split=self.half_split, norm=norm, parts=self.n_parts)

        return Setup(tensors, record)


@dataclass(frozen=True)
class Glu(Case):
    act: str = "silu"
    n: int = 64
    span: float = 8.0

    def setup(self, rng: np.random.Generator) -> Setup:
        tensors = {
            "gate": uniform(rng, self.n, span=self.span),
            "up": uniform(rng, self.n, span=self.span),
            "y": output(self.n),
        }

        def record(r: Recorder, v: Views) -> None:
            r.glu(v["gate"], v["up"], v["y"], act=self.act)

        return Setup(tensors, record)


@dataclass(frozen=True)
class CopyWords(Case):
    tolerance: ClassVar[float] = 0.0
    n: int = 64

    def setup(self, rng: np.random.Generator) -> Setup:
        src = Tensor((self.n,), "u32", rng.integers(0, 1 << 32, self.n, np.uint32))
        tensors = {"src": src, "dst": output(self.n, dtype="u32")}
        return Setup(tensors, lambda r, v: r.copy_words(v["src"], v["dst"]))


@dataclass(frozen=True)
class Scale(Case):
    tolerance: ClassVar[float] = 0.0
    n: int = 64
    c: float = 3.7

    def setup(self, rng: np.random.Generator) -> Setup:
        tensors = {"x": uniform(rng, self.n) if self.c else output(self.n), "y": output(self.n)}
        return Setup(tensors, lambda r, v: r.scale(v["x"], v["y"], c=self.c))


@dataclass(frozen=True)
class Softcap(Case):
    n: int = 64
    c: float = 30.0

    def setup(self, rng: np.random.Generator) -> Setup:
        x = (np.exp2(rng.uniform(-20, 12, self.n)) * rng.choice([-1, 1], self.n)).astype(np.float32)
        tensors = {"x": Tensor(x.shape, "f32", x), "y": output(self.n)}
        return Setup(tensors, lambda r, v: r.softcap(v["x"], v["y"], c=self.c))

    def parts(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        small = np.abs(array) < 1
        return {"small": np.where(small, array, 0), "large": np.where(small, 0, array)}


@dataclass(frozen=True)
class Xielu(Softcap):
    def setup(self, rng: np.random.Generator) -> Setup:
        tensors = super().setup(rng).tensors
        how = {"alpha_p": 0.8, "alpha_n": 1.3, "beta": 0.5, "eps": -1e-4}
        return Setup(tensors, lambda r, v: r.xielu(v["x"], v["y"], **how))


@dataclass(frozen=True)
class TopK(Case):
    """x contains `values` different numbers, zeros of both signs, and infinities. If `nan` is set, the last
    row contains one NaN. If `mapped` is set, ids come from a table. The mask allows a fraction `allowed` of
    each row, but no element of the first row."""

    tolerance: ClassVar[float] = 0.0
    n: int = 64
    rows: int = 2
    k: int = 4
    chunk: int = 64
    values: int = 1 << 20
    nan: bool = False
    mapped: bool = False
    allowed: float = 1.0

    def setup(self, rng: np.random.Generator) -> Setup:
        shape, n_chunks = (self.rows, self.n), -(-self.n // self.chunk)
        bits = np.zeros((self.rows, -(-self.n // 32) * 32), np.uint8)
        bits[1:] = rng.random((self.rows - 1, bits.shape[1])) < self.allowed
        mask = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
        x = (rng.integers(0, self.values, shape) - self.values // 2).astype(np.float32)
        x[(x == 0) & (rng.random(shape) < 0.5)] = -0.0
        x[rng.random(shape) < 0.02], x[rng.random(shape) < 0.02] = np.inf, -np.inf
        if self.nan:
            x[-1, rng.integers(0, self.n)] = np.nan
        tensors = {
            "x": Tensor(shape, "f32", x),
            "source": Tensor(shape, "u32", rng.integers(0, 1 << 31, shape).astype(np.uint32)),
            "mask": Tensor(mask.shape, "u32", mask),
            "ids": output(self.rows, n_chunks, self.k, dtype="u32"),
            "top": output(self.rows, n_chunks, self.k),
        }

        def record(r: Recorder, v: Views) -> None:
            source = v["source"] if self.mapped else None
            mask = v["mask"] if self.allowed < 1 else None
            r.top_k(v["x"], v["ids"], v["top"], source=source, mask=mask, chunk=self.chunk)

        return Setup(tensors, record)


@dataclass(frozen=True)
class LogSumExp(Case):
    """A `spread` of hundreds overflows unless the op subtracts the maximum. The first chunk of row 0 is
    -inf."""

    n: int = 64
    rows: int = 2
    chunk: int = 64
    spread: float = 5.0

    def setup(self, rng: np.random.Generator) -> Setup:
        x = (rng.standard_normal((self.rows, self.n)) * self.spread).astype(np.float32)
        x[0, : self.chunk] = -np.inf
        y = output(self.rows, -(-self.n // self.chunk), 2)
        tensors = {"x": Tensor(x.shape, "f32", x), "y": y}
        return Setup(tensors, lambda r, v: r.log_sum_exp(v["x"], v["y"], chunk=self.chunk))

    def parts(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        if name != "y":
            return {name: array}
        peaks = array[..., 0]
        return {"largest": np.where(np.isneginf(peaks), 0, peaks), "sums": array[..., 1]}


@dataclass(frozen=True)
class Add(Case):
    tolerance: ClassVar[float] = 0.0
    n: int = 64

    def setup(self, rng: np.random.Generator) -> Setup:
        tensors = {"a": uniform(rng, self.n), "b": uniform(rng, self.n), "y": output(self.n)}
        return Setup(tensors, lambda r, v: r.add(v["a"], v["b"], v["y"]))


@dataclass(frozen=True)
class AddBias(Case):
    tolerance: ClassVar[float] = 0.0
    n: int = 64
    rows: int = 1

    def setup(self, rng: np.random.Generator) -> Setup:
        shape = (self.rows, self.n)
        tensors = {"x": uniform(rng, *shape), "b": uniform(rng, self.n), "y": output(*shape)}
        return Setup(tensors, lambda r, v: r.add_bias(v["x"], v["b"], v["y"]))


@dataclass(frozen=True)
class MulVector(Case):
    tolerance: ClassVar[float] = 0.0
    n: int = 64
    rows: int = 1

    def setup(self, rng: np.random.Generator) -> Setup:
        shape = (self.rows, self.n)
        tensors = {"x": uniform(rng, *shape), "v": uniform(rng, self.n), "y": output(*shape)}
        return Setup(tensors, lambda r, v: r.mul_vector(v["x"], v["v"], v["y"]))


@dataclass(frozen=True)
class Clamp(Case):
    tolerance: ClassVar[float] = 0.0
    n: int = 64

    def setup(self, rng: np.random.Generator) -> Setup:
        tensors = {"x": uniform(rng, self.n, span=4.0), "y": output(self.n)}
        return Setup(tensors, lambda r, v: r.clamp(v["x"], v["y"], low=-1.3, high=0.7))


@dataclass(frozen=True)
class PoolRows(Case):
    n: int = 64
    rows: int = 1
    count: int = 4

    def setup(self, rng: np.random.Generator) -> Setup:
        tensors = {"x": uniform(rng, self.rows * self.count, self.n), "y": output(self.rows, self.n)}
        return Setup(tensors, lambda r, v: r.pool_rows(v["x"], v["y"], count=self.count))


@dataclass(frozen=True)
class Columns(Case):
    tolerance: ClassVar[float] = 0.0
    n: int = 64
    width: int = 100
    first: int = 0
    rows: int = 1

    def setup(self, rng: np.random.Generator) -> Setup:
        x = uniform(rng, self.rows, self.width)
        assert x.raw is not None
        x.raw[:, : self.first] = x.raw[:, self.first + self.n :] = np.nan
        tensors = {"x": x, "y": output(self.rows, self.n)}
        return Setup(tensors, lambda r, v: r.columns(v["x"], v["y"], first=self.first))
