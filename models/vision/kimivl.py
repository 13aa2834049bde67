"""kimivl (Kimi-VL): MoonViT on pictures of any size, with an interpolated table of positions and RoPE; 2 x 2
patches become a row. Kimi team 2025, arXiv:2504.07491.
"""

from __future__ import annotations

import numpy as np

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.vision.encoder import ROPE, Encoder
from vkbackend.models.vision.interpolation import resized_cubic
from vkbackend.models.vision.patches import axial_rope, patch_order, patch_positions
from vkbackend.models.vision.picture import Tile

ROPE_BASE = 10_000.0
NORM_EPS = 1e-5  # epsilon of the projector's norm


class Model(Encoder):
    text_architectures = ("deepseek2",)
    marks = ("<|media_start|>", "<|media_content|>", "<|media_end|>")

    def check(self) -> None:
        self.check_square_table()

    def most_patches(self, max_tokens: int) -> int:
        return max_tokens * self.n_merged

    def position_rows(self, grid: tuple[int, int]) -> np.ndarray:
        assert self.positions is not None
        return resized_cubic(self.positions, grid)[patch_order(grid, self.merge)]

    def table_widths(self) -> dict[str, int]:
        return super().table_widths() | {ROPE: self.config.head_dim}

    def tables(self, tile: Tile) -> dict[str, np.ndarray]:
        at = patch_positions(tile.grid, self.merge)[:, ::-1]
        return super().tables(tile) | {ROPE: self.rope(axial_rope(at, self.config.head_dim, ROPE_BASE))}

    def rope(self, rows: np.ndarray) -> np.ndarray:
        """Reorder the pairs of a head, f32 [n, head_dim / 2, 2]. In the input, the first half rotates by the
        column. In the result, pairs for columns and lines alternate."""
        return np.ascontiguousarray(rows.reshape(len(rows), 2, -1, 2).swapaxes(1, 2)).reshape(rows.shape)

    def projector_weights(self) -> list[WeightSpec]:
        c, n_in = self.config, self.n_merged * self.config.n_embd
        return [
            WeightSpec("mm.input_norm.weight", (c.n_embd,)),
            WeightSpec("mm.1.weight", (n_in, n_in)),
            WeightSpec("mm.2.weight", (c.projection_dim, n_in)),
        ]

    def rotate(self, x: Tensor, w: Weights, name: str) -> Tensor:
        return ops.rope(x, self.config.head_dim, ROPE)

    def project(self, h: Tensor, w: Weights) -> Tensor:
        h, name = self.norm(h, w, "v.post_ln"), "mm.input_norm"
        h = ops.joined_rows(ops.layer_norm(h, w(name), w.bias(name), NORM_EPS), self.n_merged)
        return self.linear(ops.gelu_erf(self.linear(h, w, "mm.1")), w, "mm.2")
