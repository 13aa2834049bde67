"""What a model file says of its weights: names, shapes, roles in a plan, parts of fused tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from vkbackend import shaderlib
from vkbackend.meta.plan import MIRROR, Role
from vkbackend.models.gguf.header import TensorInfo
from vkbackend.models.gguf.reader import GGUF

MATRIX_TYPES = shaderlib.weight_types()
FLOAT_TYPES = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class Part:
    """What one weight takes of a tensor that several share: seen as [repeat, total, ...], begin:end of each.

    q, k and v rows in one tensor have repeat 1; where every head has its q rows and its gate's, or every
    expert its gate and up, repeat is their number. Where the rows of every head are those of several
    `segments` (q, k and v), the weight has the first segment of all heads, then the second of all, and so on.
    """

    tensor: str
    begin: int
    end: int
    total: int
    repeat: int = 1
    segments: tuple[int, ...] = ()

    def cut(self, raw: np.ndarray) -> np.ndarray:
        """The part's bytes of the tensor's, rows in order: a view, unless it has several segments."""
        own = raw.reshape(self.repeat, self.total, -1)[:, self.begin : self.end]
        if not self.segments:
            return own
        ends = list(accumulate(self.segments))
        return np.concatenate([run.reshape(-1, run.shape[-1]) for run in np.split(own, ends[:-1], axis=1)])

    def rows(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Where the weight has its rows of the tensor's runs begin..end: ranges to put side by side."""
        found, before = [], 0
        for n in self.segments or (self.end - self.begin,):
            found.append((before * self.repeat + begin * n, before * self.repeat + end * n))
            before += n
        return found

    def whole(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The shapes that the tensor may have where the part has `shape`: one axis is longer."""
        n = self.end - self.begin
        return [
            (*shape[:axis], size // n * self.total, *shape[axis + 1 :])
            for axis, size in enumerate(shape)
            if size % n == 0
        ]


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight a model reads: its GGUF name, its shape (rows first) and the role that decides its slices.

    `host` keeps it in pinned host memory (tables of which a step reads a few rows). `source` is the tensor to
    fall back to where the file has none of that name (a tied lm_head); `part` says which part of a shared
    tensor it is. In the file it may be a stack of `stacked` matrices. `values` are those of a weight that is
    in no file (f32). With `f32`, and for vectors, devices hold f32 whatever floats the file has.
    """

    name: str
    shape: tuple[int, ...]
    role: Role = MIRROR
    host: bool = False
    source: str = ""
    part: Part | None = None
    values: np.ndarray | None = field(default=None, compare=False)
    f32: bool = False
    stacked: int = 0

    @property
    def types(self) -> tuple[str, ...]:
        """What the file may store."""
        return FLOAT_TYPES if self.widened else MATRIX_TYPES

    @property
    def widened(self) -> bool:
        """Devices hold f32: few bytes, read by ops that take nothing else."""
        return self.f32 or len(self.shape) == 1

    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes that its tensor may have in a file, but for axes of one element (`fits`)."""
        if self.stacked:
            return [(self.stacked, self.shape[0] // self.stacked, *self.shape[1:])]
        return self.part.whole(self.shape) if self.part else [self.shape]

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether its tensor may have that shape in a file: axes of one element may be there or not."""
        return _without_ones(shape) in map(_without_ones, self.shapes())

    def tensor(self, gguf: GGUF) -> TensorInfo | None:
        """Where it is in a file."""
        if self.part:
            return gguf.tensors.get(self.part.tensor)
        return gguf.tensors.get(self.name) or gguf.tensors.get(self.source)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def fused(tensor: str, specs: Sequence[WeightSpec], repeat: int = 1) -> list[WeightSpec]:
    """The specs as parts of one tensor, in order: their rows, or those of each of `repeat` runs of rows (the
    experts of a stack, the heads of a matrix)."""
    counts = [math.prod(spec.shape[: max(1, len(spec.shape) - 1)]) // repeat for spec in specs]
    ends, total = list(accumulate(counts)), sum(counts)
    return [
        replace(spec, part=Part(tensor, end - count, end, total, repeat))
        for spec, count, end in zip(specs, counts, ends, strict=True)
    ]
