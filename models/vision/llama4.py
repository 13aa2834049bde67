"""llama4 (Llama 4 Scout and Maverick): a class token with the last position, and RoPE of columns and lines on
square tiles; 2 x 2 patches become a row. Meta AI 2025, "The Llama 4 herd".
"""

from __future__ import annotations

import numpy as np

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.vision.class_token import WithClassToken
from vkbackend.models.vision.encoder import ROPE
from vkbackend.models.vision.patches import axial_rope, patch_positions
from vkbackend.models.vision.picture import Tile

ROPE_BASE = 10_000.0


class Model(WithClassToken):
    text_architectures = ("llama4",)
    marks = ("<|image_start|>", "<|image|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>")
    class_position = -1

    def table_widths(self) -> dict[str, int]:
        return super().table_widths() | {ROPE: self.config.head_dim}

    def tables(self, tile: Tile) -> dict[str, np.ndarray]:
        """Columns and lines count from 1. The class token has position 0, so it is not rotated."""
        at = np.concatenate([patch_positions(tile.grid, self.merge)[:, ::-1] + 1, [[0, 0]]])
        return super().tables(tile) | {ROPE: axial_rope(at, self.config.head_dim, ROPE_BASE)}

    def projector_weights(self) -> list[WeightSpec]:
        names = "mm.model.mlp.1.weight", "mm.model.mlp.2.weight", "mm.model.fc.weight"
        n_in, specs = self.n_merged * self.config.n_embd, list[WeightSpec]()
        for name in names[:2]:
            shape = self._shapes.get(name, ())
            specs.append(WeightSpec(name, (shape[0] if len(shape) == 2 else n_in, n_in)))
            n_in = specs[-1].shape[0]
        return [*specs, WeightSpec(names[2], (self.config.projection_dim, n_in))]

    def rotate(self, x: Tensor, w: Weights, name: str) -> Tensor:
        return ops.rope(x, self.config.head_dim, ROPE)

    def activate(self, x: Tensor) -> Tensor:
        return ops.gelu_erf(x)  # in these files, `use_gelu` means the exact form

    def project(self, h: Tensor, w: Weights) -> Tensor:
        h = ops.joined_rows(self.norm(h, w, "v.post_ln"), self.n_merged)
        for i in (1, 2):
            h = ops.gelu_erf(self.linear(h, w, f"mm.model.mlp.{i}"))
        return self.linear(h, w, "mm.model.fc")
