"""Addresses the cells of the KV cache through tables, so that any block may hold a slot's positions.

A position's cell is table[slot][position // B] * B + position % B, with blocks of B cells. Layers with the
same number of blocks per slot share a table. At first every slot has consecutive blocks. If a slot's blocks
hold less than the context, the blocks are a ring of the newest positions. Later the prefix cache may assign
any block to any slot.
"""

from __future__ import annotations

import numpy as np

from vkbackend.meta.split import split
from vkbackend.meta.stores import Stores
from vkbackend.models.architectures.memory_specs import LayerCache
from vkbackend.models.options import Options
from vkbackend.models.placement.cache_plan import CachePlan
from vkbackend.models.placement.layout import Layout, memories
from vkbackend.models.placement.recurrent_state import RecurrentState
from vkbackend.ops import CELL_BLOCK


class CellTable:
    """Maps each position of `n_slots` sequences to its cell. `flush` copies changes to the devices."""

    def __init__(self, stores: Stores, plan: CachePlan) -> None:
        self._stores, self.ring, self.n_blocks = stores, plan.ring, plan.n_blocks
        self.window = plan.window
        index = np.arange(plan.width, dtype=np.uint32) % plan.ring
        slots = np.arange(plan.n_slots, dtype=np.uint32)[:, None]
        self.table = (slots * plan.ring + index) % np.uint32(plan.n_blocks)
        self.cells = stores.constant(f"cells.{plan.ring}", self.table)
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


class KVCache:
    """`own` holds the caches of layers with their own cache. `layers` holds the cache or recurrent state that
    each layer reads."""

    def __init__(self, stores: Stores, layout: Layout, options: Options) -> None:
        self.plans = layout.caches
        self.tables: dict[int, CellTable] = {}  # The key is the plan's `ring`.
        self.states = RecurrentState(stores, layout.states, options)
        caches: dict[int, LayerCache] = {}
        for plan in self.plans:
            if plan.ring not in self.tables:
                self.tables[plan.ring] = CellTable(stores, plan)
            table = self.tables[plan.ring]
            table.window = max(table.window, plan.window)
            arrays = {
                name: stores.cache(
                    f"cache_{name}_l{plan.layer}",
                    plan.n_cells,
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
            )
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
