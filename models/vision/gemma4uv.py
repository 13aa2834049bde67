"""gemma4uv (Gemma 4 12B): no encoder. Squares of pixels are normed, projected, and get embeddings of their
line and column.
"""

from __future__ import annotations

import numpy as np

from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.vision import gemma4
from vkbackend.models.vision.encoder import PATCHES, POSITIONS
from vkbackend.models.vision.picture import Tile

EPS = 1e-5  # epsilon of the layer norms


class Model(gemma4.Model):
    merge = 1

    def weights(self) -> list[WeightSpec]:
        c, n = self.config, self.n_pixels
        norms = [
            WeightSpec(f"v.patch_norm.{i}.{kind}", (size,))
            for i, size in ((1, n), (2, c.n_embd), (3, c.n_embd))
            for kind in ("weight", "bias")
        ]
        patch = WeightSpec("v.patch_embd.weight", (c.n_embd, n))
        bias = WeightSpec("v.patch_embd.bias", (c.n_embd,))
        return [patch, bias, *norms, *self.projector_weights()]

    def forward(self, graph: Graph, w: Weights) -> None:
        def norm(x: Tensor, i: int) -> Tensor:
            name = f"v.patch_norm.{i}"
            return ops.layer_norm(x, w(name), w.bias(name), EPS)

        h = self.linear(norm(ops.host_rows(graph, PATCHES), 1), w, "v.patch_embd")
        h = norm(norm(h, 2) + ops.host_rows(graph, POSITIONS), 3)
        h = ops.head_norm(h, None, self.config.n_embd, self.config.eps)
        ops.hidden_states(self.linear(h, w, "mm.input_projection"))

    def table_widths(self) -> dict[str, int]:
        return {PATCHES: self.n_pixels, POSITIONS: self.config.n_embd}

    def tables(self, tile: Tile) -> dict[str, np.ndarray]:
        return {PATCHES: tile.patches, POSITIONS: self.position_rows(tile.grid)}
