"""A layer's memory of a sequence: keys and values, or a recurrent state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vkbackend.meta.tensor import Weight

# A step that verifies a draft has up to 8 rows, and then the head drafts 7 more positions. After that, a
# recurrent model may compute the step again from its first row.
KEPT_ROWS = 16


@dataclass(frozen=True, slots=True)
class KVSpec:
    """A layer's caches, split along the plan's dimension `dim`. A row attends to `window` positions, or to
    all if `window` is 0. A layer with an `owner` reads the caches of that earlier layer. `index_dim` is the
    size of index keys, or 0 without an indexer. `raw_dim` is the number of values per position from which
    index keys are pooled, or 0. A layer with a `chooser` attends to positions that the indexer of that
    earlier layer chose. If `n_kept` is not 0, the cache also keeps a row of `n_kept` values for each of a
    slot's last KEPT_ROWS positions. If `head_dim_v` is 0, the keys are the values. There is an index key per
    `block` positions. With `entries`, K also has an entry for each block of the text, and the other keys and
    the raw values are kept for `window` positions."""

    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    dim: str = "kv_heads"
    window: int = 0
    owner: int | None = None
    index_dim: int = 0
    raw_dim: int = 0
    chooser: int | None = None
    n_kept: int = 0
    block: int = 1
    entries: bool = False

    @property
    def leader(self) -> int | None:
        return self.owner if self.owner is not None else self.chooser


@dataclass(frozen=True, slots=True)
class KeyRotation:
    """RoPE of a layer's cached keys: the name of the table, and how dimensions are paired."""

    table: str
    half_split: bool


@dataclass(frozen=True, slots=True)
class LayerCache:
    """A layer's caches `k` and `v` [n_cells, n_head_kv * head_dim] and its cell table [n_slots, blocks]. The
    cells hold the last `window` positions, or all positions if `window` is 0. If `shared`, another layer
    writes the caches. `index` holds the indexer's keys [n_cells, index_dim], `raw` the values from which
    index keys are pooled [n_cells, raw_dim], and `kept` the rows of the last positions [n_slots, KEPT_ROWS,
    n_kept]. Entries follow the positions' keys in `k`, from cell `first_entry` on. `entry_cells` is the cell
    table of entries and index keys."""

    k: Weight
    v: Weight
    cells: Weight
    window: int = 0
    shared: bool = False
    index: Weight | None = None
    raw: Weight | None = None
    kept: Weight | None = None
    entry_table: Weight | None = None
    first_entry: int = 0

    @property
    def entry_cells(self) -> Weight:
        return self.entry_table or self.cells


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A layer's recurrent state, split along the plan's dimension `dim`. `arrays` lists the arrays: the name,
    and the number of values per unit of `dim` in each segment. `extra` lists arrays split along another
    dimension. `kv` describes the caches of a layer that also attends."""

    n_units: int
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    dim: str = "k_heads"
    extra: StateSpec | None = None
    kv: KVSpec | None = None


@dataclass(frozen=True, slots=True)
class LayerState:
    """A recurrent state's arrays [n_cells, values] by name, and the caches if the layer also attends."""

    arrays: Mapping[str, Weight]
    cache: LayerCache | None = None


LayerMemory = LayerCache | LayerState


MemorySpec = KVSpec | StateSpec | None  # None if rows do not interact.


def kv_of(spec: MemorySpec) -> KVSpec | None:
    return spec.kv if isinstance(spec, StateSpec) else spec
