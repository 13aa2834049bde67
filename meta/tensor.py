"""Tensors over N devices have a split state and a view per device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vkbackend.buffer import ALIGN, View, aligned
from vkbackend.meta.split import State
from vkbackend.meta.step_kind import StepKind
from vkbackend.ops import Groups, Recorder
from vkbackend.recording import Pace
from vkbackend.runtime import Device


@dataclass(slots=True)
class Weight:
    """A matrix [n_out, n_in] or vector [n]. Each device's slice is a list of pieces (first local row, view).

    A slice has several pieces if it exceeds one binding, and none if it is empty. A piece of a stack is
    (first expert, view). `starts` holds each device's prefix sums of the experts' FFN columns, u32 [n_expert
    + 1].
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    state: State
    pieces: list[list[tuple[int, View]]]
    starts: dict[int, View] = field(default_factory=dict)
    low_rank: LowRank | None = None
    slots: SlotStack | None = None
    streamed: bool = False  # whether the host copies it from the file while a step runs

    def whole(self, device: int) -> View:
        """Return the single piece of an unsplit weight (norms, caches)."""
        [(_, view)] = self.pieces[device]
        return view


ALIGN_WORDS = ALIGN // 4  # Layers' tables begin at multiples of this, so equal layers are recorded once.


@dataclass(frozen=True, slots=True)
class SlotTable:
    """A layer's expert cache. In `Inputs.experts`, a table of `n_experts` ids begins at word `at`, followed
    by the prefix sums of columns by id. A slot has `strides[d]` ids on device d. If all experts have the same
    number of columns, it has one id. Otherwise it has one id for the expert's columns, and one for the unused
    columns of the slot."""

    n_experts: int
    n_slots: int
    strides: tuple[int, ...]
    at: int
    counts_at: int  # index of the layer's first expert in `Inputs.counts`

    @property
    def starts_at(self) -> int:
        return self.at + self.n_experts

    def n_ids(self, d: int) -> int:
        return self.strides[d] * self.n_slots

    @property
    def n_words(self) -> int:
        return aligned(self.n_experts + 2 * self.n_slots + 1, ALIGN_WORDS)

    @property
    def n_counts(self) -> int:
        return aligned(self.n_experts, ALIGN_WORDS)


@dataclass(slots=True)
class SlotStack:
    """Copies of some experts of a stack in device memory. `pieces[d]` lists (first slot, view) on device d.
    All stacks of a layer share a table."""

    table: SlotTable
    pieces: list[list[tuple[int, View]]]


@dataclass(slots=True)
class LowRank:
    """The matrices A and B of all adapters for a weight W, with ranks up to `rank`. For a matrix, `a` is [n *
    width, n_in], `b` [n_out, n * rank], and `starts` lists the first row of each adapter in `a`. Matrices
    with the same input share `a`, in which an adapter's rows for W begin at `first`. For experts, `a` is [n *
    n_expert, rank, n_in] and `b` [n * n_expert, n_out, rank], without `starts`."""

    a: Weight
    b: Weight
    rank: int
    width: int
    first: int = 0
    starts: Weight | None = None


@dataclass(slots=True, eq=False)
class Tensor:
    """An activation f32 [rows, width]. `views[d]` is device d's slice.

    `base` is a MIRRORED addend of a PARTIAL tensor, and is added once after the sum. `whole` is the tensor
    that replaced this one when this one was reduced or sent to more devices.
    """

    graph: TensorGraph
    rows: int
    width: int
    state: State
    views: list[View | None]
    base: Tensor | None = None
    whole: Tensor | None = None
    # by device and format
    converted: dict[tuple[int, str], View] = field(default_factory=dict)
    # products of this tensor and the adapters' A, by device and name of A
    low_rank: dict[tuple[int, str], View] = field(default_factory=dict)

    def __add__(self, other: Tensor) -> Tensor:
        return self.graph.add(self, other)

    def on(self, device: int) -> View:
        view = self.views[device]
        assert view is not None, f"device {device} holds nothing of a tensor that is {self.state}"
        return view


@dataclass(slots=True)
class Inputs:
    """A step's inputs on one device: StepParams, and RoPE rows by table name. `host` is the memory that the
    host writes, `device` the device's copy."""

    step: View
    rope: dict[str, View]
    host: View
    device: View
    logits: View | None  # Host-visible f32 [max_outputs, the device's vocabulary rows].
    mask: View | None = None  # A set bit for each allowed token, u32 [max_outputs, words].
    adapters: View | None = None  # Ids and scales of the rows' adapters (meta/ops/low_rank.py).
    hidden: View | None = None  # Hidden states on one device, f32 [n_hidden, n_embd], in `logits`.
    experts: View | None = None  # Tables of expert caches, u32.
    counts: View | None = None  # Host-visible use counts, u32 [2 halves, experts of all layers].
    used: View | None = None  # Host-visible ids of a layer's used experts, u32.
    streamed: frozenset[int] = frozenset()  # layers whose weights are copied from the file (streams.py)
    # The rows of images, f32 [1 + n_rows, n_embd], for the embedding and for each deepstack layer. The first
    # row is zero.
    images: tuple[View, ...] = ()


class TensorGraph(Protocol):
    @property
    def devices(self) -> Sequence[Device]: ...
    @property
    def inputs(self) -> Sequence[Inputs]: ...
    @property
    def kind(self) -> StepKind: ...
    @property
    def kept(self) -> dict[str, Tensor]: ...
    @property
    def lane(self) -> int: ...
    @property
    def adapted(self) -> set[str]: ...
    @property
    def adapter_groups(self) -> dict[int, Groups | None]: ...
    @property
    def n(self) -> int: ...
    def pace(self, d: int) -> Pace: ...
    def readers(self) -> tuple[int, ...]: ...
    def on(self, d: int, name: str | Weight) -> Recorder: ...
    def new(
        self, rows: int, width: int, state: State, label: str, holders: Sequence[int] | None = None
    ) -> Tensor: ...
    def scratch(self, shape: tuple[int, ...], label: str) -> View: ...
    def all_reduce(
        self, x: Tensor, norm: Weight | None = None, eps: float = 0.0, wire: str = ""
    ) -> tuple[Tensor, Tensor | None]: ...
    def fetch_experts(self, ids: Mapping[int, View], n_experts: int, stacks: Sequence[Weight]) -> None: ...
    def add(self, a: Tensor, b: Tensor) -> Tensor: ...
