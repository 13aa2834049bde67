"""What model files share: weight specifications, strict configuration reads, plan dimensions, weight
lookup."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from vkbackend import shaderlib
from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.plan import MIRROR, Role
from vkbackend.meta.policy import Layer
from vkbackend.meta.tensor import Tensor, Weight
from vkbackend.models.gguf.header import TensorInfo
from vkbackend.models.gguf.reader import GGUF
from vkbackend.rope import RopeTable

MAX_HEAD_DIM = 576
MAX_LAYERS = 1024
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


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Caches of one layer: kv heads and their widths; split like the plan's dimension `dim`.

    `window`: positions that a row sees, 0 for all. `owner`: the earlier layer whose caches this one reads
    instead of having its own; its q heads then lie where the owner's do.
    """

    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    dim: str = "kv_heads"
    window: int = 0
    owner: int | None = None


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The K and V cache of one layer [n_cells, n_head_kv * head_dim], the cell table [n_slots, blocks], the
    window that the cells suffice for (0: all positions), and whether another layer stores into them."""

    k: Weight
    v: Weight
    cells: Weight
    window: int = 0
    shared: bool = False


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The recurrent state of one layer: arrays of (name, values per unit of each segment), whose units are
    those of the plan's dimension `dim`. It has no positions: it is what the whole sequence so far left.

    `beside`: more arrays of the layer, cut along another dimension. `kv`: its caches, if it attends too.
    """

    n_units: int
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    dim: str = "k_heads"
    beside: StateSpec | None = None
    kv: KVSpec | None = None


@dataclass(frozen=True, slots=True)
class LayerState:
    """The state of one layer: arrays [n_cells, values] by name, none where the layer remembers nothing, and
    the caches of one that attends too."""

    arrays: Mapping[str, Weight]
    cache: LayerCache | None = None


LayerMemory = LayerCache | LayerState
MemorySpec = KVSpec | StateSpec | None  # None: what a layer computes of a row depends on that row alone


def kv_of(spec: MemorySpec) -> KVSpec | None:
    """The caches of a layer, if it attends."""
    return spec.kv if isinstance(spec, StateSpec) else spec


class Weights:
    """Weights by short name: `w("attn_q")` is `<prefix>attn_q.weight`, `w.bias("attn_q")` its bias, if
    any."""

    def __init__(self, weights: Mapping[str, Weight], prefix: str = "") -> None:
        self._weights, self._prefix = weights, prefix

    def layer(self, il: int) -> Weights:
        return Weights(self._weights, f"blk.{il}.")

    def __call__(self, name: str) -> Weight:
        return self._weights[f"{self._prefix}{name}.weight"]

    def has(self, name: str) -> bool:
        return f"{self._prefix}{name}.weight" in self._weights

    def bias(self, name: str) -> Weight | None:
        return self.get(f"{name}.bias")

    def get(self, name: str) -> Weight | None:
        """By its name with the suffix, None where the model has no such weight."""
        return self._weights.get(f"{self._prefix}{name}")


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    """x times the matrix of that name, plus its bias, if any."""
    return ops.linear(x, w(name), w.bias(name))


class Model(Protocol):
    """One architecture: hyper-parameters, weights with roles, the graph of a step. Knows no device and no
    split."""

    n_layer: int
    n_vocab: int
    n_embd: int
    n_ctx_train: int
    n_used: int  # experts per token, 0 without experts
    control: Mapping[int, np.ndarray]  # by layer: what is added to the residual behind it, f32 [n_embd]
    in_file: frozenset[str]  # weights that can be read in the mapped file (tensors.weights_in_file)

    def weights(self) -> list[WeightSpec]: ...
    def unread(self) -> set[str]: ...  # tensors that files may have and no device needs
    def kv(self, il: int) -> MemorySpec: ...
    def ropes(self, n_ctx: int) -> dict[str, RopeTable]: ...  # for contexts of n_ctx tokens
    def layer(self, il: int, types: Mapping[str, str]) -> Layer: ...
    def forward(self, graph: Graph, w: Weights, caches: list[LayerMemory]) -> None: ...


# ---- strict reads ----


def read_count(gguf: GGUF, key: str, default: Any = None, limit: int = 1 << 24) -> int:
    """A positive integer hyper-parameter (a per-layer array is accepted where all layers agree); 0 stands for
    the default, where there is one."""
    name = f"{gguf.architecture}.{key}"
    if name in gguf.metadata and gguf.metadata.kind(name)[1]:
        values = {int(v) for v in gguf.ints(name)}
        if len(values) != 1:
            raise UnsupportedModel(
                f"{name} differs between layers ({sorted(values)[:8]}); one value is supported"
            )
        value = values.pop()
    else:
        value = gguf.u32(name) if default is None else gguf.u32(name, default) or default
    return _counted(gguf, name, int(value), limit)


def read_counts(
    gguf: GGUF,
    key: str,
    n_layer: int,
    default: Sequence[int] | None = None,
    limit: int = 1 << 24,
    low: int = 1,
) -> tuple[int, ...]:
    """An integer of every layer, at least `low`: one value for all, or an array with one each."""
    name = f"{gguf.architecture}.{key}"
    if name not in gguf.metadata and default is not None:
        return tuple(default)
    if name not in gguf.metadata or not gguf.metadata.kind(name)[1]:
        return (read_count(gguf, key, limit=limit),) * n_layer
    values = [int(v) for v in gguf.ints(name)]
    if len(values) < n_layer:
        raise GGUFError(f"{gguf.paths[0]}: {name} has {len(values)} values for {n_layer} layers")
    return tuple(_counted(gguf, name, value, limit, low) for value in values[:n_layer])


def read_n_layer(gguf: GGUF) -> int:
    """Layers that a token goes through: those that predict tokens further ahead come behind them."""
    n_layer = read_count(gguf, "block_count", limit=MAX_LAYERS)
    n_ahead = int(gguf.u32(f"{gguf.architecture}.nextn_predict_layers", 0))
    if n_ahead >= n_layer:
        raise GGUFError(f"{gguf.paths[0]}: {n_ahead} of {n_layer} layers predict tokens further ahead")
    return n_layer - n_ahead


def read_windowed(gguf: GGUF, n_layer: int, period: int) -> tuple[bool, ...]:
    """Which layers see a sliding window: as the file says for each, or all but every `period`-th one (the
    file's period, else this one)."""
    name = f"{gguf.architecture}.attention.sliding_window_pattern"
    if name in gguf.metadata and gguf.metadata.kind(name)[1]:
        flags = [bool(flag) for flag in gguf.get(name)] or [il % period < period - 1 for il in range(n_layer)]
        if len(flags) < n_layer:
            raise GGUFError(f"{gguf.paths[0]}: {name} has {len(flags)} values for {n_layer} layers")
        return tuple(flags[:n_layer])
    period = int(gguf.u32(name, period)) or n_layer + 1
    return tuple(il % period < period - 1 for il in range(n_layer))


def _counted(gguf: GGUF, name: str, value: int, limit: int, low: int = 1) -> int:
    if not low <= value <= limit:
        raise GGUFError(f"{gguf.paths[0]}: {name} is {value}, expected {low}..{limit}")
    return value


def check_off(gguf: GGUF, key: str, off: float = 0) -> None:
    """Refuse a feature that is switched on: the key must be absent or at an off value."""
    name = f"{gguf.architecture}.{key}"
    if name not in gguf.metadata:
        return
    value = gguf.metadata[name]
    allowed = np.array_equal(value, off)
    if off is not True:  # a switch that is on by default must say so; any other may be 0, false or empty
        allowed = allowed or is_off(value)
    if not allowed:
        raise UnsupportedModel(f"{name} = {value} is not supported; only {off} (off) is")


def is_off(value: Any) -> bool:
    """Whether a value says that a feature is not there: 0, false, minus infinity, nothing but those, nothing
    at all."""
    if isinstance(value, str | bytes):
        return not value
    return all(v == 0 or v == -math.inf for v in np.atleast_1d(np.asarray(value, object)).tolist())


def read_float(gguf: GGUF, key: str, default: float, low: float = -math.inf) -> float:
    """A number, at least `low`; the default where the key is absent or at an off value."""
    name = f"{gguf.architecture}.{key}"
    if name in gguf.stated:
        return float(gguf.stated[name])
    if name not in gguf.metadata or is_off(gguf.metadata[name]):
        return default
    value = float(gguf.f32(name))
    if value < low:
        raise GGUFError(f"{gguf.paths[0]}: {name} is {value}, expected at least {low}")
    return value


ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def read_rope(
    gguf: GGUF, n_rot: int, n_ctx_train: int, freq_factors: Any = None, interleaved: bool = False
) -> RopeTable:
    """The RoPE table of the `rope.*` keys: plain, linear or YaRN scaling, or frequency factors (longrope);
    sections as RopeTable has them."""
    arch = gguf.architecture
    kind = gguf.string(f"{arch}.rope.scaling.type", "none") or "none"
    factor = read_float(gguf, "rope.scaling.factor", read_float(gguf, "rope.scale_linear", 0.0))
    if kind == "none" and is_off(gguf.get(f"{arch}.rope.scaling.type", "")) and factor not in (0.0, 1.0):
        kind = "linear"  # older files give the factor alone
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise UnsupportedModel(
            f"{arch}.rope.scaling.type = {kind!r} is not supported; none, linear, yarn and longrope are"
        )
    sections = [int(n) for n in gguf.ints(f"{arch}.rope.dimension_sections", [])]
    if len(sections) not in (0, 3, 4):
        raise GGUFError(f"{gguf.paths[0]}: {arch}.rope.dimension_sections are {sections}, expected 3 or 4")
    return RopeTable(
        n_rot=n_rot,
        freq_base=read_float(gguf, "rope.freq_base", 10_000.0),
        freq_factors=freq_factors,
        scaling=kind if factor and kind != "longrope" else "none",  # longrope: all in its factors
        factor=factor or 1.0,
        orig_ctx=read_orig_ctx(gguf, n_ctx_train),
        attn_factor=read_float(gguf, "rope.scaling.attn_factor", 1.0),
        beta_fast=read_float(gguf, "rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=read_float(gguf, "rope.scaling.yarn_beta_slow", 1.0),
        ext_factor=read_float(gguf, "rope.scaling.yarn_ext_factor", 1.0),
        sections=tuple([*sections, 0][:4]) if any(sections) else (),
        interleaved=interleaved,
    )


def read_orig_ctx(gguf: GGUF, n_ctx_train: int) -> int:
    """The context length before it was extended."""
    return int(gguf.u32(f"{gguf.architecture}.rope.scaling.original_context_length", 0)) or n_ctx_train


def read_temperature(gguf: GGUF, n_ctx_train: int) -> dict[str, Any]:
    """What a RoPE table that turns q says of its temperature: none, or one that grows at every multiple of a
    length, which is the original context length where the file says nothing."""
    length = int(gguf.u32(f"{gguf.architecture}.attention.temperature_length", 0))
    return {
        "temperature": read_float(gguf, "attention.temperature_scale", 0.0),
        "temperature_length": length or read_orig_ctx(gguf, n_ctx_train),
    }


def read_factors(gguf: GGUF, name: str) -> np.ndarray | None:
    """Divisors of RoPE's frequencies, one per pair, if the file has them."""
    return gguf.data(name).view("<f4") if name in gguf.tensors else None
