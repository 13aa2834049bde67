"""Addresses the cells of the KV cache through tables, so that any block may hold a slot's positions.

A position's cell is table[slot][position // B] * B + position % B, with blocks of B cells. Layers with the
same number of blocks per slot share a table. At first every slot has consecutive blocks. If a slot's blocks
hold less than the context, the blocks are a ring of the newest positions. Later the prefix cache may assign
any block to any slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vkbackend.meta.split import split
from vkbackend.meta.stores import Stores
from vkbackend.meta.tensor import Weight
from vkbackend.models.architectures.memory_specs import LayerCache
from vkbackend.models.options import Options
from vkbackend.models.placement.cache_plan import CachePlan
from vkbackend.models.placement.layout import Layout, memories
from vkbackend.models.placement.recurrent_state import RecurrentState
from vkbackend.ops import CELL_BLOCK
from vkbackend.ops.attention_tiles import cells_per_block


class CellTable:
    """Maps each position of `n_slots` sequences to its cell. `flush` copies changes to the devices."""

    def __init__(self, stores: Stores, plan: CachePlan, ring: int, n_blocks: int) -> None:
        self._stores, self.ring, self.n_blocks = stores, ring, n_blocks
        self.window = 0
        index = np.arange(plan.width, dtype=np.uint32) % ring
        slots = np.arange(plan.n_slots, dtype=np.uint32)[:, None]
        self.table = (slots * ring + index) % np.uint32(n_blocks)
        self.cells = stores.constant(f"cells.{ring}", self.table)
        self._changed: dict[int, tuple[int, int]] = {}  # slot -> (begin, end) of the changed entries

    @property
    def capacity(self) -> int:
        """Return how many positions a slot can hold even if they begin inside a block."""
        return (self.ring - (self.ring < self.table.shape[1])) * CELL_BLOCK

    def at(self, slot: int, positions: np.ndarray) -> np.ndarray:
        blocks = self.table[slot].astype(np.int64)[positions // CELL_BLOCK]
        return blocks * CELL_BLOCK + positions % CELL_BLOCK

    def set(self, slot: int, index: int, block: int) -> None:
        if self.table[slot, index] != block:
            self.table[slot, index] = block
            begin, end = self._changed.get(slot, (index, index + 1))
            self._changed[slot] = min(begin, index), max(end, index + 1)

    def flush(self) -> None:
        for slot, (begin, end) in self._changed.items():
            self._stores.update(self.cells, self.table[slot, begin:end], slot, begin)
        self._changed.clear()

    def update(self) -> None:
        self._stores.update(self.cells, self.table)


@dataclass(frozen=True, slots=True)
class CachePart:
    """Cells of one kind in an array of a layer. A cell covers `block` positions, and a block of the table
    has `n_cells`, from cell `first` of `array` on. `shape` is (KV heads, head size). The cells hold the last
    `window` positions, or all if `window` is 0."""

    name: str
    array: Weight
    table: CellTable
    shape: tuple[int, int]
    window: int
    block: int = 1
    n_cells: int = CELL_BLOCK
    first: int = 0

    def at(self, slot: int, first: int, last: int) -> np.ndarray:
        """Return the cells of the blocks of positions that end at `first` to `last` - 1."""
        positions = np.arange(first, last)
        positions = positions[(positions + 1) % self.block == 0]
        blocks = self.table.table[slot].astype(np.int64)[positions // CELL_BLOCK]
        return self.first + blocks * self.n_cells + positions % CELL_BLOCK // self.block


def parts_of(
    plan: CachePlan, arrays: Mapping[str, Weight], table: CellTable, of_entries: CellTable
) -> list[CachePart]:
    parts, block, window = [], plan.spec.block, plan.spec.window
    for name, width, _ in plan.arrays:
        array, shape = arrays[name], (plan.n_heads(name), width)
        if name != "index":
            parts.append(CachePart(f"cache_{name}_l{plan.layer}", array, table, shape, window))
        if name == "index" or (name == "k" and plan.spec.entries):
            stored = f"cache_{'index' if name == 'index' else 'entries'}_l{plan.layer}"
            window_of_entries = 0 if plan.spec.entries else window
            first = plan.n_cells if name == "k" else 0
            how = block, cells_per_block(block), first
            parts.append(CachePart(stored, array, of_entries, shape, window_of_entries, *how))
    return parts


class KVCache:
    """`own` holds the caches of layers with their own cache. `layers` holds the cache or recurrent state that
    each layer reads."""

    def __init__(self, stores: Stores, layout: Layout, options: Options) -> None:
        self.plans = layout.caches
        self.tables: dict[int, CellTable] = {}  # The key is a plan's `ring` or `entry_ring`.
        self.parts: list[CachePart] = []
        self.states = RecurrentState(stores, layout.states, options)
        caches: dict[int, LayerCache] = {}
        for plan in self.plans:
            rings = (plan.ring, plan.n_blocks), (plan.entry_ring, plan.n_entry_blocks)
            for ring, n_blocks in rings:
                if ring not in self.tables:
                    self.tables[ring] = CellTable(stores, plan, ring, n_blocks)
            table, of_entries = self.tables[plan.ring], self.tables[plan.entry_ring]
            table.window = max(table.window, plan.window)
            arrays = {
                name: stores.cache(
                    f"cache_{name}_l{plan.layer}",
                    plan.rows_of(name),
                    plan.n_heads(name) * width,
                    dtype,
                    split(1, plan.heads_of(name), [width]),
                    plan.home,
                )
                for name, width, dtype in plan.arrays
            }
            kept = stores.zeros(f"kept_l{plan.layer}", plan.kept, plan.home) if plan.spec.n_kept else None
            caches[plan.layer] = LayerCache(
                arrays["k"],
                arrays.get("v", arrays["k"]),
                table.cells,
                plan.spec.window,
                index=arrays.get("index"),
                raw=arrays.get("raw"),
                kept=kept,
                entry_table=of_entries.cells if of_entries is not table else None,
                first_entry=plan.n_cells,
            )
            self.parts += parts_of(plan, arrays, table, of_entries)
        self.own = caches
        self.layers = memories(layout, caches, self.states.layers)

    @property
    def groups(self) -> list[CellTable | None]:
        """Return the table of layers without a window (or None), then the tables of layers with windows."""
        windows = [table for table in self.tables.values() if table.window]
        return [next((table for table in self.tables.values() if not table.window), None), *windows]

    def flush(self) -> None:
        for table in self.tables.values():
            table.flush()

    def resumable(self, n_stored: int) -> int:
        """Return the first position at which a sequence can continue: its row attends only to positions that
        are still in the rings."""
        first = 0
        for plan in self.plans:
            if n_stored > (capacity := self.tables[plan.ring].capacity):
                first = max(first, n_stored - capacity + plan.spec.window - 1)
        return first
