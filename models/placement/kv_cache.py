"""The KV cache: cells addressed through tables, so that a slot's positions may lie anywhere.

cell = table[slot][position // B % blocks] * B + position % B, where a slot has `blocks` blocks of B cells.
With fewer blocks than the context has they are a ring that keeps the newest positions. A table starts as the
identity: slot s owns the s-th stretch. Layers with equally many blocks share one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vkbackend.meta.mesh import Mesh
from vkbackend.meta.split import split
from vkbackend.models.architectures.base import LayerCache, LayerMemory
from vkbackend.models.options import Options
from vkbackend.models.placement.layout import Layout
from vkbackend.models.placement.recurrent_state import RecurrentState
from vkbackend.ops import CELL_BLOCK


class CellTable:
    """Where the positions of `n_slots` sequences lie; `update` brings a changed `table` to the devices."""

    def __init__(self, mesh: Mesh, n_slots: int, blocks: int) -> None:
        self._mesh = mesh
        self.table = np.arange(n_slots * blocks, dtype=np.uint32).reshape(n_slots, blocks)
        self.cells = mesh.constant(f"cells.{blocks}", self.table)

    @property
    def capacity(self) -> int:
        """Positions of a slot that are there at once."""
        return self.table.shape[1] * CELL_BLOCK

    def at(self, slot: int, positions: np.ndarray) -> np.ndarray:
        """The cells of positions."""
        blocks = self.table[slot].astype(np.int64)[positions // CELL_BLOCK % self.table.shape[1]]
        return blocks * CELL_BLOCK + positions % CELL_BLOCK

    def update(self) -> None:
        self._mesh.update(self.cells, self.table)


class KVCache:
    """K and V caches of every layer; `layers` are what each reads, a sharing layer its owner's, a recurrent
    one its state."""

    def __init__(self, mesh: Mesh, layout: Layout, options: Options) -> None:
        self.plans = layout.caches
        self.tables: dict[int, CellTable] = {}  # by blocks per slot
        self.states = RecurrentState(mesh, layout.states, options)
        own: dict[int, LayerCache] = {}
        for plan in self.plans:
            if plan.blocks not in self.tables:
                self.tables[plan.blocks] = CellTable(mesh, plan.n_slots, plan.blocks)
            k, v = (
                mesh.cache(
                    f"cache_{name}_l{plan.layer}",
                    plan.n_cells,
                    plan.spec.n_head_kv * width,
                    dtype,
                    split(1, plan.heads, [width]),
                    plan.home,
                )
                for name, width, dtype in plan.arrays
            )
            own[plan.layer] = LayerCache(k, v, self.tables[plan.blocks].cells, plan.spec.window)
        self.layers: list[LayerMemory] = [
            self.states.layers.get(il) or (own[il] if owner is None else replace(own[owner], shared=True))
            for il, owner in enumerate(layout.cache_owners)
        ]

    def resumable(self, n_stored: int) -> int:
        """The first position at which a sequence can go on after `n_stored` positions were written: what a
        row there sees is still in every ring."""
        first = 0
        for plan in self.plans:
            if n_stored > (capacity := self.tables[plan.blocks].capacity):
                first = max(first, n_stored - capacity + plan.spec.window - 1)
        return first
