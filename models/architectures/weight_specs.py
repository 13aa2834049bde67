"""Describes an architecture's weights by name, shape, role in a plan, and rows in fused tensors."""

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
    """A weight's rows in a fused tensor of shape [repeat, total, ...]. The weight is rows begin:end of each
    repeat.

    `repeat` is the number of heads (or experts) if the fused weights alternate per head, else 1. `segments`
    lists each segment's number of rows. The weight consists of the first segments of all repeats, then the
    second segments.
    """

    tensor: str
    begin: int
    end: int
    total: int
    repeat: int = 1
    segments: tuple[int, ...] = ()

    def cut(self, raw: np.ndarray) -> np.ndarray:
        """Return the weight's bytes with rows in order. The result is a view, unless the weight has
        segments."""
        part = raw.reshape(self.repeat, self.total, -1)[:, self.begin : self.end]
        if not self.segments:
            return part
        ends = list(accumulate(self.segments))
        return np.concatenate([run.reshape(-1, run.shape[-1]) for run in np.split(part, ends[:-1], axis=1)])

    def rows(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return a range of the weight's rows for each segment: the rows of the repeats `begin` to `end` -
        1."""
        ranges, before = [], 0
        for n in self.segments or (self.end - self.begin,):
            ranges.append((before * self.repeat + begin * n, before * self.repeat + end * n))
            before += n
        return ranges

    def whole(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        n = self.end - self.begin
        return [
            (*shape[:axis], size // n * self.total, *shape[axis + 1 :])
            for axis, size in enumerate(shape)
            if size % n == 0
        ]


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A weight's GGUF name, its shape (rows first), and its role in a plan.

    A `host` weight is stored in pinned host memory, because a step reads only a few of its rows. `source`
    is the tensor to use if the file lacks `name` (a tied lm_head). If `stacked` is not 0, the file's
    tensor stacks `stacked` matrices. If `groups` is not 0, the file's tensor may have an axis of groups
    before the rows; converters omit this axis, and files that llama.cpp saves have it. `values` are the
    elements, of type `dtype`, of a weight that the model's file lacks. `axes` is the shape of the file's
    tensor if it has more axes, such as the tensor of a convolution. If `f32`, floats become f32 on
    loading, because ops read these weights only as f32. Vectors always become f32.
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
    groups: int = 0
    axes: tuple[int, ...] = ()
    dtype: str = "f32"

    @property
    def types(self) -> tuple[str, ...]:
        return FLOAT_TYPES if self.widened else MATRIX_TYPES

    @property
    def widened(self) -> bool:
        return self.f32 or len(self.shape) == 1

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes that a file's tensor may have. `fits` ignores axes of one element."""
        if self.stacked:
            return [(self.stacked, self.shape[0] // self.stacked, *self.shape[1:])]
        if self.part:
            return self.part.whole(self.shape)
        grouped = [(self.groups, self.shape[0] // self.groups, *self.shape[1:])] if self.groups else []
        return [self.axes or self.shape, *grouped]

    def fits(self, shape: tuple[int, ...]) -> bool:
        return _without_ones(shape) in map(_without_ones, self.shapes())

    def tensor(self, gguf: GGUF) -> TensorInfo | None:
        if self.part:
            return gguf.tensors.get(self.part.tensor)
        return gguf.tensors.get(self.name) or gguf.tensors.get(self.source)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def fused(tensor: str, specs: Sequence[WeightSpec], repeat: int = 1) -> list[WeightSpec]:
    """Return the specs as consecutive rows of one tensor, `repeat` times (once per expert or head)."""
    counts = [math.prod(spec.shape[: max(1, len(spec.shape) - 1)]) // repeat for spec in specs]
    ends, total = list(accumulate(counts)), sum(counts)
    return [
        replace(spec, part=Part(tensor, end - count, end, total, repeat))
        for spec, count, end in zip(specs, counts, ends, strict=True)
    ]
