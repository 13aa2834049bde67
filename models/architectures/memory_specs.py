"""What a layer remembers: keys and values, or a recurrent state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vkbackend.meta.tensor import Weight


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Caches of one layer: kv heads and their widths; split like the plan's dimension `dim`.

    `window`: positions that a row sees, 0 for all. `owner`: the earlier layer whose caches this one reads
    instead of having its own. `index_dim`: values of a position's index key, by which an indexer chooses
    positions, 0 without one. `chooser`: the earlier layer whose choice this one attends to.
    """

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
        """The earlier layer on whose devices this one's q heads must lie."""
        return self.owner if self.owner is not None else self.chooser


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The K and V cache of one layer [n_cells, n_head_kv * head_dim], the cell table [n_slots, blocks], the
    window that the cells are enough for (0: all positions). `shared`: another layer writes the cache.
    `index`: the keys of an indexer [n_cells, index_dim]."""

    k: Weight
    v: Weight
    cells: Weight
    window: int = 0
    shared: bool = False
    index: Weight | None = None

    @property
    def arrays(self) -> tuple[Weight, ...]:
        """All that is stored of a position, in the order of CachePlan.arrays."""
        return (self.k, self.v, self.index) if self.index else (self.k, self.v)


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The recurrent state of one layer: arrays of (name, values per unit of each segment), whose units are
    those of the plan's dimension `dim`. A state has no positions: it sums up the whole sequence so far.

    `beside`: more arrays of the layer, cut along another dimension. `kv`: its caches, if it attends too.
    """

    n_units: int
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    dim: str = "k_heads"
    beside: StateSpec | None = None
    kv: KVSpec | None = None


@dataclass(frozen=True, slots=True)
class LayerState:
    """The state of one layer: arrays [n_cells, values] by name (none if the layer remembers nothing), and the
    caches of a layer that also has attention."""

    arrays: Mapping[str, Weight]
    cache: LayerCache | None = None


LayerMemory = LayerCache | LayerState


MemorySpec = KVSpec | StateSpec | None  # None: what a layer computes of a row depends on that row alone


def kv_of(spec: MemorySpec) -> KVSpec | None:
    """The caches of a layer, if it attends."""
    return spec.kv if isinstance(spec, StateSpec) else spec
