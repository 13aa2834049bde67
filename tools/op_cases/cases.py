"""Test cases of the ops, one class per op: a case is data, its repr is its name, and it says how far from its
twin it may be. Tests check them, benchmarks time them. Long because every op has its shapes here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from vkbackend import ops, shaderlib
from vkbackend.formats import block_of, dequantize
from vkbackend.ops import Recorder
from vkbackend.ops.elementwise import ACTS
from vkbackend.step import MAX_ROWS
from vkbackend.tools.op_cases import attention, half, heads, moe, recurrent
from vkbackend.tools.op_cases import field as op_cases_field
from vkbackend.tools.op_cases import matrix as op_cases_matrix
from vkbackend.tools.op_cases import quantized as op_cases_quantized
from vkbackend.tools.op_cases.setup import (
    Case,
    Setup,
    Tensor,
    Views,
    cos_sin_of,
    output,
    step_of,
    uniform,
    weights,
)
from vkbackend.twins.arrays import put_f16
from vkbackend.wire import F16_BLOCK, wire_words

Q8_FLIP = 1e-5  # NMSE: one code in 64 that fell on the other side of a border


def as_numbers(array: np.ndarray, n: int) -> np.ndarray:
    """Rows of n, dequantized where they are bytes of q8."""
    return dequantize(array.reshape(-1), "q8", (len(array), n)) if array.dtype == np.uint8 else array


# ---- one class per op ----


@dataclass(frozen=True)
class Embed(Case):
    """`rows` of the bucket, `used` of them in the step, some ids beyond the table; `pieces` of the table."""

    tolerance: ClassVar[float] = 1e-12
    type: str = "f32"
    n_embd: int = 64
    n_vocab: int = 13
    rows: int = 5
    used: int = 3
    ids: int = ops.TOKENS
    pieces: int = 1

    def setup(self, rng: np.random.Generator) -> Setup:
        outputs = tuple(rng.integers(0, self.n_vocab, self.used)) if self.ids else ()
        step = step_of(rng, ((0, 5, MAX_ROWS if self.ids else self.used),), self.n_vocab, outputs)
        if not self.ids:
            step.rows[self.used - 1, 2] = self.n_vocab  # one id that does not exist
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
class Rope(Case):
    n_heads: int = 2
    head_dim: int = 16
    n_rot: int = 16
    rows: int = 3
    half_split: bool = False
    in_place: bool = False
    norm: str = ""  # "plain", "weighted"

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
            r.rope(v["x"], v["cos_sin"], y, half_split=self.half_split, norm=norm)

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
    """Any bits; more words than all workgroups take in one turn."""

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
    """Magnitudes from where tanh(x) is x to where it is 1."""

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
class TopK(Case):
    """`values` different numbers, few for many ties, zeros of both signs, infinities, and NaN in a row with
    `nan`; with `mapped` ids come from a table, with `allowed` a mask leaves that share of the places, and
    none in the first row."""

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
    """Logits of a spread that a model has; `spread` of hundreds would overflow without the largest. Chunks of
    -inf alone in the first row."""

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


@dataclass(frozen=True)
class PackBf16(Case):
    """Any bits, after those that decide: ties to even and odd, the largest float, inf, NaN of least payload,
    subnormals, zeros of both signs."""

    tolerance: ClassVar[float] = 0.0
    n: int = 64

    def setup(self, rng: np.random.Generator) -> Setup:
        bits = rng.integers(0, 1 << 32, self.n, np.uint32)
        special = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFF800000, 0x7F800001, 0xFFFFFFFF]
        special += [0x00000001, 0x00008000, 0x00018000, 0x80000000, 0]
        bits[: len(special)] = special[: self.n]
        tensors = {"x": Tensor((self.n,), "f32", bits), "y": output(-(-self.n // 2), dtype="u32")}
        return Setup(tensors, lambda r, v: r.pack_bf16(v["x"], v["y"]))


@dataclass(frozen=True)
class PackHalves(Case):
    """In each block numbers of 45 binades, more than are kept: first the smallest and the largest floats, inf
    and NaN between them, later ties, a largest that rounds up, the border to zero, zeros alone at the end."""

    tolerance: ClassVar[float] = 0.0
    n: int = 64
    keeps: bool = True

    def setup(self, rng: np.random.Generator) -> Setup:
        tops = rng.integers(1, 255, -(-self.n // F16_BLOCK)).repeat(F16_BLOCK)[: self.n]
        exponents = np.maximum(tops - rng.integers(0, 45, self.n), 0).astype(np.uint32)
        bits = rng.integers(0, 1 << 23, self.n, np.uint32) | exponents << 23
        bits |= rng.integers(0, 2, self.n, np.uint32) << 31
        special = [0x7F7FFFFF, 0x00000001, 0x80000000, 0x00800000, 0x007FFFFF, 0x7F800001, 0xFF800000]
        special += [0x7F801000, 0x7F800000, 0xFF7FF000, 0xFF7FEFFF, 0x7F001000, 0x7F003000, 0x7F001001]
        bits[: len(special)] = special[: self.n]
        one = [0x3FFFF000, 0xB8801000, 0x38801001, 0x31000000, 0x30FFFFFF, 0xB0FFF000, 0x31000FFF, 0xFFC00000]
        bits[F16_BLOCK : F16_BLOCK + len(one)] = one[: max(0, self.n - F16_BLOCK)]
        if self.n > 2 * F16_BLOCK:
            bits[F16_BLOCK + len(one) : 2 * F16_BLOCK] &= (
                0xBFFFFFFF  # below two, so that `one` has the largest
            )
            bits[self.n // F16_BLOCK * F16_BLOCK :] = 0x80000000
        tensors = {"x": Tensor((self.n,), "f32", bits)}
        for name in ("y", "kept") if self.keeps else ("y",):
            tensors[name] = output(wire_words("f16", self.n), dtype="u32")
        return Setup(tensors, lambda r, v: r.pack_halves(v["x"], v["y"], v.get("kept")))


@dataclass(frozen=True)
class AddPartials(Case):
    """Slots outside `writers` and the own slot hold NaN: they must not be read, nor multiplied by zero."""

    exact: ClassVar[tuple[str, ...]] = ("h", "residual")
    n: int = 64
    rows: int = 1
    n_slots: int = 2
    own: int | None = 0
    writers: int = 3
    residual: bool = True
    norm: bool = True
    in_place: bool = False
    wire: str = "f32"
    out: str = "f32"

    def parts(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        return {name: as_numbers(array, self.n)}

    @property
    def tolerance(self) -> float:  # type: ignore[override]
        return Q8_FLIP if self.out == "q8" else 1e-10

    def packed(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(slots, a share) over the f16 wire, blocks of different sizes, two words between slots."""
        n = self.rows * self.n
        n_words = wire_words("f16", n)
        sizes = np.exp2(rng.integers(-8, 1, -(-n // F16_BLOCK)).repeat(F16_BLOCK)[:n]).astype(np.float32)
        packed = np.full((self.n_slots + 1, n_words + 2), 0x7F007F00, np.uint32)
        for s, words in enumerate(packed):
            if s == self.n_slots or (s != self.own and self.writers >> s & 1):
                put_f16(sizes * rng.uniform(-1, 1, n).astype(np.float32), words)
        return packed[:-1], packed[-1, :n_words]

    def setup(self, rng: np.random.Generator) -> Setup:
        stride = self.rows * self.n + 3
        slots = rng.uniform(-1, 1, (self.n_slots, stride)).astype(np.float32)
        for s in range(self.n_slots):
            if s == self.own or not self.writers >> s & 1:
                slots[s] = np.nan
        shape = (self.rows, self.n)
        if self.wire == "bf16":  # the upper halves of floats are bfloat16 already
            halves = slots.view(np.uint16)[:, 1::2][:, : stride // 2 * 2]
            slots = np.ascontiguousarray(halves).view(np.uint32)
        own = uniform(rng, *shape)
        if self.wire == "f16":
            slots, kept = self.packed(rng)
            own = Tensor(kept.shape, "u32", kept)
        tensors = {"slots": Tensor(slots.shape, "f32" if self.wire == "f32" else "u32", slots)}
        if self.own is not None:
            tensors["own"] = own
        if self.residual:
            tensors["residual"] = uniform(rng, *shape)
            tensors["residual"].written = self.in_place
        if not self.in_place:
            tensors["h"] = output(*shape)
        if self.norm:
            tensors |= {"w": uniform(rng, self.n), "y": output(*shape, dtype=self.out)}

        def record(r: Recorder, v: Views) -> None:
            h = v["residual"] if self.in_place else v["h"]
            r.add_partials(v.get("residual"), v.get("own"), v["slots"], v.get("w"), h, v.get("y"),
                own_index=self.own, writers=self.writers, eps=1e-6, wire=self.wire,
            )  # fmt: skip

        return Setup(tensors, record)


# ---- the list ----


@dataclass
class _Sweep:
    """Cases of the quick suite, and the wide ones that run on request."""

    quick: list[Case] = field(default_factory=list)
    wide: list[Case] = field(default_factory=list)


def _cases() -> _Sweep:
    s = _Sweep()
    s.quick += [
        Embed("f32", n_embd=7),
        Embed("f16", n_embd=33),
        Embed("q8_0", n_embd=2048),
        Embed("q4_0", n_embd=32),
        Embed("q8_0", n_embd=96, pieces=3),
        Embed("f32", n_embd=576, n_vocab=MAX_ROWS, ids=ops.OUTPUTS),
    ]
    s.quick += [RmsNorm(n, rows) for n, rows in ((1, 1), (31, 5), (256, 3), (257, 2), (4096, 2))]
    s.quick += [
        RmsNorm(128, 40, has_w=False),
        RmsNorm(32, 2, has_w=False, out="q8"),
        RmsNorm(544, 3, out="q8"),
    ]
    s.quick += op_cases_matrix.quick()
    s.quick += [
        Rope(1, 2, 2, 1),
        Rope(3, 64, 64, 7),
        Rope(3, 80, 32, 5, half_split=True),
        Rope(2, 128, 128, 2, half_split=True, in_place=True),
        Rope(5, 24, 8, 1, in_place=True),
        Rope(5, 24, 8, 3, norm="weighted"),
        Rope(2, 288, 288, 2, half_split=True, in_place=True, norm="plain"),
    ]
    s.quick += [Glu(act, 257, 12.0) for act in ACTS]
    s.quick += [Glu("silu", 1), Glu("silu", 640, 120.0), Glu("gelu", 640, 120.0), Add(1), Add(1031)]
    s.quick += [TopK(1, k=1), TopK(200, k=7, chunk=64, values=9), TopK(130, 3, k=64, chunk=130, nan=True)]
    s.quick += [TopK(96, k=7, chunk=96, mapped=True, values=30), TopK(33, 3, k=40, chunk=33, allowed=0.5)]
    s.quick += [TopK(1031, 3, k=7, chunk=64, allowed=0.1), TopK(32, k=5, chunk=32, allowed=0.0, nan=True)]
    s.quick += [LogSumExp(1, chunk=1), LogSumExp(257, 3, chunk=64), LogSumExp(1031, 5, 500, 300.0)]
    s.wide += [
        TopK(1031, 5, k=k, chunk=c, values=v) for k in (1, 7, 64) for c in (64, 1031) for v in (3, 9999)
    ]
    s.quick += [
        Scale(1),
        Scale(1031),
        Scale(33, c=0.0),
        Softcap(1031),
        CopyWords(1),
        CopyWords(129),
        CopyWords(40_001),
    ]
    s.quick += [
        AddPartials(),
        AddPartials(288, 3, own=1, out="q8"),
        AddPartials(2048, 3, n_slots=5, own=2, writers=0b10110, in_place=True),
        AddPartials(257, 2, n_slots=3, own=None, writers=0b101),
        AddPartials(31, 2, n_slots=2, own=1, writers=0b01, residual=False),
        AddPartials(64, 4, n_slots=1, own=0, writers=0, norm=False),
        AddPartials(257, 3, n_slots=4, own=2, writers=0b1101, wire="bf16"),
        AddPartials(31, 1, n_slots=2, own=None, writers=0b11, norm=False, wire="bf16"),
        AddPartials(257, 3, n_slots=4, own=2, writers=0b1101, wire="f16"),
        AddPartials(1, 1, n_slots=2, own=0, writers=0b11, norm=False, wire="f16"),
        AddPartials(127, 3, n_slots=2, own=None, writers=0b11, norm=False, wire="f16"),
        AddPartials(512, 2, own=1, out="q8", wire="f16"),
    ]
    s.quick += [Columns(1, 1), Columns(31, 127, 96, 5), Columns(64, 192, 64, 3)]
    s.quick += [AddBias(1), AddBias(257, 5), PackBf16(1), PackBf16(12), PackBf16(1031)]
    s.quick += [PackHalves(n, n != 2) for n in (1, 2, 127, 128, 129, 1031)]
    s.quick += attention.quick()
    s.wide += attention.wide()
    s.quick += [*moe.quick(), *recurrent.quick(), *heads.quick()]
    s.quick += [*op_cases_quantized.quick(), *half.quick()]
    s.wide += [*moe.wide(), *recurrent.wide(), *op_cases_quantized.wide()]
    s.wide += op_cases_field.wide()
    s.wide += [RmsNorm(n, 3) for n in (64, 128, 256, 768, 1536, 8192)]
    s.wide += [
        Rope(2, 80, 20, 9),
        Rope(3, 128, 32, 9, half_split=True),
        Rope(8, 256, 64, 512, half_split=True),
    ]
    s.wide += [Rope(8, 256, 256, 512, half_split=True), Rope(8, 512, 128, 512, half_split=True)]
    s.wide += [TopK(2**i + j, k=min(40, 2**i - 1), chunk=2**i) for i in (4, 7, 10, 12) for j in (-1, 0)]
    s.wide += [Embed(kind, 256, 80_000) for kind in ("f32", "q4_0", "q6_k")]
    for kind in shaderlib.weight_types():
        block = block_of(kind)[0]
        k = 288 if 288 % block == 0 else 3 * block
        s.wide += [Embed(kind, k, pieces=3), Embed(kind, 11 * block, 31), Embed(kind, 4096, rows=1, used=1)]
        s.wide += [*op_cases_matrix.wide(kind), *half.wide(kind)]
    return s


def _format_cases() -> _Sweep:
    """Every weight type in every op that reads weights; rows of three blocks begin at every alignment."""
    s = _Sweep()
    for kind in shaderlib.weight_types():
        block = block_of(kind)[0]
        k = 3 * block if block > 1 else 31
        s.quick += [
            Embed(kind, k),
            *op_cases_matrix.some_of(kind, k),
            heads.one_of(kind, k),
            *op_cases_quantized.one_of(kind),
            *moe.some_of(kind),
        ]
        s.wide += [*op_cases_matrix.some_of_gpus(kind, k), *half.some_of_gpus(kind, k)]
        s.wide += [*op_cases_quantized.one_tiled(kind), *moe.some_of_gpus(kind)]
    return s


def _bench_cases() -> list[Case]:
    cases: list[Case] = []
    for kind in shaderlib.weight_types():
        cases += [*op_cases_matrix.bench(kind), *half.bench(kind)]
        cases += [*op_cases_quantized.bench(kind), *moe.bench(kind)]
    cases += [op_cases_quantized.QuantizeQ8(k, rows) for k, rows in ((1024, 1), (4096, 1), (1024, 128))]
    return [*cases, *attention.bench()]


_QUICK_FORMATS, _WIDE_FORMATS = _format_cases().quick, _format_cases().wide
FORMAT_CASES: list[Case] = [*_QUICK_FORMATS, *_WIDE_FORMATS]
CASES: list[Case] = [*_cases().quick, *_QUICK_FORMATS]
BENCH_CASES: list[Case] = _bench_cases()
_SWEPT = dict.fromkeys([*CASES, *_cases().wide, *_WIDE_FORMATS])  # some cases follow from two rules
WIDE_CASES: list[Case] = list(_SWEPT)[len(CASES) :]
