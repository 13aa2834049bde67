"""The KV cache: cells addressed through a table, so that a slot's positions may lie anywhere.

cell = table[slot][position // B] * B + position % B. The table starts as the identity: slot s owns the s-th
stretch.
"""

from __future__ import annotations

import numpy as np

from vkbackend.meta.mesh import Mesh
from vkbackend.meta.split import scaled
from vkbackend.models.base import LayerCache, Model
from vkbackend.models.layout import Layout, Options
from vkbackend.ops import CELL_BLOCK


class KVCache:
    """K and V caches of every layer for `n_slots` sequences of up to `n_ctx` positions each."""

    def __init__(self, mesh: Mesh, model: Model, layout: Layout, options: Options) -> None:
        blocks = -(-options.n_ctx // CELL_BLOCK)
        self.table = np.arange(options.n_slots * blocks, dtype=np.uint32).reshape(options.n_slots, blocks)
        n_cells = self.table.size * CELL_BLOCK
        self.cells = mesh.constant("cells", self.table)
        self.layers: list[LayerCache] = []
        for il, (plan, home) in enumerate(zip(layout.plans, layout.kv_homes, strict=True)):
            spec = model.kv(il)
            heads = plan.ranges[spec.dim]
            k, v = (
                mesh.cache(
                    f"cache_{name}_l{il}", n_cells, spec.n_head_kv * width, dtype, scaled(heads, width), home
                )
                for name, width, dtype in (
                    ("k", spec.head_dim_k, options.type_k),
                    ("v", spec.head_dim_v, options.type_v),
                )
            )
            self.layers.append(LayerCache(k, v, self.cells))
