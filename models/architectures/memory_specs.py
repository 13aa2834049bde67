"""A layer's memory of a sequence: keys and values, or a recurrent state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vkbackend.meta.tensor import Weight


@dataclass(frozen=True, slots=True)
class KVSpec:
    """A layer's caches, split along the plan's dimension `dim`. `window`: positions that a row attends to, 0
    for all. `owner`: the earlier layer whose caches this layer reads instead. `index_dim`: values of an
    indexer's key per position, 0 without an indexer. `chooser`: the earlier layer whose choice of positions
    this layer uses."""

    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    dim: str = "kv_heads"
    window: int = 0
    owner: int | None = None
    index_dim: int = 0
    chooser: int | None = None

    @property
    def leader(self) -> int | None:
        return self.owner if self.owner is not None else self.chooser


@dataclass(frozen=True, slots=True)
class LayerCache:
    """K and V of a layer [n_cells, n_head_kv * head_dim], the cell table [n_slots, blocks], and the `window`
    that the cells hold (0: all positions). `shared`: another layer writes the cache. `index`: an indexer's
    keys [n_cells, index_dim]."""

    k: Weight
    v: Weight
    cells: Weight
    window: int = 0
    shared: bool = False
    index: Weight | None = None

    @property
    def arrays(self) -> tuple[Weight, ...]:
        """The arrays in the order of CachePlan.arrays."""
        return (self.k, self.v, self.index) if self.index else (self.k, self.v)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A layer's recurrent state, split along the plan's dimension `dim`. `arrays`: (name, values per unit of
    each segment). `extra`: more arrays, split along another dimension. `kv`: the layer's caches, if it also
    attends."""

    n_units: int
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    dim: str = "k_heads"
    extra: StateSpec | None = None
    kv: KVSpec | None = None


@dataclass(frozen=True, slots=True)
class LayerState:
    """Arrays [n_cells, values] by name, and caches if the layer also attends."""

    arrays: Mapping[str, Weight]
    cache: LayerCache | None = None


LayerMemory = LayerCache | LayerState


MemorySpec = KVSpec | StateSpec | None  # None: the layer's rows do not interact


def kv_of(spec: MemorySpec) -> KVSpec | None:
    return spec.kv if isinstance(spec, StateSpec) else spec
