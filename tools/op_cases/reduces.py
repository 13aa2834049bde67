from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vkbackend.ops import Recorder
from vkbackend.tools.op_cases.setup import (
    Q8_FLIP,
    Case,
    Setup,
    Tensor,
    Views,
    as_numbers,
    output,
    uniform,
)
from vkbackend.twins.arrays import put_f16
from vkbackend.wire import F16_BLOCK, wire_words


@dataclass(frozen=True)
class PackBf16(Case):
    """Values begin with ties, the largest float, inf, NaN with the smallest payload, subnormals and zeros of
    both signs. Random bits follow."""

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
    """Magnitudes in a block span 45 powers of two, more than the wire format represents. The first block also
    has extremes, inf and NaN. The second block has ties, a maximum that rounds up, and numbers just above and
    below the largest one that rounds to zero. An incomplete last block contains only zeros."""

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
        pattern = [
            0x3FFFF000,
            0xB8801000,
            0x38801001,
            0x31000000,
            0x30FFFFFF,
            0xB0FFF000,
            0x31000FFF,
            0xFFC00000,
        ]
        bits[F16_BLOCK : F16_BLOCK + len(pattern)] = pattern[: max(0, self.n - F16_BLOCK)]
        if self.n > 2 * F16_BLOCK:
            bits[F16_BLOCK + len(pattern) : 2 * F16_BLOCK] &= 0xBFFFFFFF  # keeps magnitudes below 2
            bits[self.n // F16_BLOCK * F16_BLOCK :] = 0x80000000
        tensors = {"x": Tensor((self.n,), "f32", bits)}
        for name in ("y", "kept") if self.keeps else ("y",):
            tensors[name] = output(wire_words("f16", self.n), dtype="u32")
        return Setup(tensors, lambda r, v: r.pack_halves(v["x"], v["y"], v.get("kept")))


@dataclass(frozen=True)
class AddPartials(Case):
    """The device's own slot and slots outside `writers` contain NaN, because the shader must not read
    them."""

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
        """Return the slots and this device's partial sum in f16 wire format. Two unused words follow each
        slot."""
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
        if self.wire == "bf16":  # a float's upper 16 bits
            halves = slots.view(np.uint16)[:, 1::2][:, : stride // 2 * 2]
            slots = np.ascontiguousarray(halves).view(np.uint32)
        sum_of = uniform(rng, *shape)
        if self.wire == "f16":
            slots, kept = self.packed(rng)
            sum_of = Tensor(kept.shape, "u32", kept)
        tensors = {"slots": Tensor(slots.shape, "f32" if self.wire == "f32" else "u32", slots)}
        if self.own is not None:
            tensors["own"] = sum_of
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
