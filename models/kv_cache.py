"""The KV cache: cells addressed through a table, so that a slot's positions may lie anywhere.

cell = table[slot][position // B] * B + position % B. The table starts as the identity: slot s owns the s-th
stretch.
"""

from __future__ import annotations

import numpy as np

from vkbackend.meta.mesh import Mesh
from vkbackend.meta.plan import Plan
from vkbackend.meta.split import scaled
from vkbackend.models.base import LayerCache, Model
from vkbackend.ops import CELL_BLOCK


class KVCache:
    """K and V caches of every layer for `n_slots` sequences of up to `n_ctx` positions each."""

    def __init__(
        self,
        mesh: Mesh,
        model: Model,
        plans: list[Plan],
        *,
        n_ctx: int,
        n_slots: int,
        type_k: str,
        type_v: str,
    ) -> None:
        blocks = -(-n_ctx // CELL_BLOCK)
        self.table = np.arange(n_slots * blocks, dtype=np.uint32).reshape(n_slots, blocks)
        n_cells = self.table.size * CELL_BLOCK
        self.cells = mesh.constant("cells", self.table)
        self.layers: list[LayerCache] = []
        for il, plan in enumerate(plans):
            spec = model.kv(il)
            heads = plan.ranges[spec.dim]
            k = mesh.cache(
                f"cache_k_l{il}",
                n_cells,
                spec.n_head_kv * spec.head_dim_k,
                type_k,
                scaled(heads, spec.head_dim_k),
            )
            v = mesh.cache(
                f"cache_v_l{il}",
                n_cells,
                spec.n_head_kv * spec.head_dim_v,
                type_v,
                scaled(heads, spec.head_dim_v),
            )
            self.layers.append(LayerCache(k, v, self.cells))
