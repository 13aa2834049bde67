"""Qwen's encoders of pictures of any size: two-dimensional RoPE; 2 x 2 patches become a row.

Wang et al. 2024, arXiv:2409.12191.
"""

from __future__ import annotations

import numpy as np

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.vision.encoder import ROPE, Encoder
from vkbackend.models.vision.patches import axial_rope, patch_positions
from vkbackend.models.vision.picture import Tile


class QwenVL(Encoder):
    patch_weights = ("v.patch_embd.weight", "v.patch_embd.weight.1")
    marks = ("<|vision_start|>", "<|vision_end|>")
    has_grid = True
    rope_base = 10_000.0

    def most_patches(self, max_tokens: int) -> int:
        return max_tokens * self.n_merged

    def table_widths(self) -> dict[str, int]:
        return super().table_widths() | {ROPE: self.config.head_dim}

    def tables(self, tile: Tile) -> dict[str, np.ndarray]:
        at = patch_positions(tile.grid, self.merge)
        return super().tables(tile) | {ROPE: axial_rope(at, self.config.head_dim, self.rope_base)}

    def projector_weights(self) -> list[WeightSpec]:
        n_in, n_out = self.n_merged * self.config.n_embd, self.config.projection_dim
        return [WeightSpec("mm.0.weight", (n_in, n_in)), WeightSpec("mm.2.weight", (n_out, n_in))]

    def rotate(self, x: Tensor, w: Weights, name: str) -> Tensor:
        return ops.rope(x, self.config.head_dim, ROPE, half_split=True)

    def project(self, h: Tensor, w: Weights) -> Tensor:
        h = ops.joined_rows(self.norm(h, w, "v.post_ln"), self.n_merged)
        return linear(ops.gelu_erf(linear(h, w, "mm.0")), w, "mm.2")
