"""lfm2 (LFM2-VL, LFM2.5-VL): SigLIP 2 on pictures and tiles of any size; 2 x 2 patches become a row.

Tschannen et al. 2025, arXiv:2502.14786.
"""

from __future__ import annotations

import numpy as np

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.vision.encoder import Encoder
from vkbackend.models.vision.interpolation import resized
from vkbackend.models.vision.patches import patch_order

NORM_EPS = 1e-5  # epsilon of the projector's norm
TILE = 512  # side of a tile in pixels


class Model(Encoder):
    text_architectures = ("lfm2", "lfm2moe")
    marks = ("<|image_start|>", "<|image_end|>")

    def check(self) -> None:
        self.check_square_table()

    def most_patches(self, max_tokens: int) -> int:
        return max((TILE // self.config.patch_size) ** 2, max_tokens * self.n_merged)

    def position_rows(self, grid: tuple[int, int]) -> np.ndarray:
        assert self.positions is not None
        rows = resized(self.positions, grid, align_corners=False, antialias=True)
        return rows[patch_order(grid, self.merge)]

    def projector_weights(self) -> list[WeightSpec]:
        n_in, n_out = self.n_merged * self.config.n_embd, self.config.projection_dim
        shape = self._shapes.get("mm.1.weight", ())
        n_hidden = shape[0] if len(shape) == 2 else n_out
        specs = [WeightSpec("mm.1.weight", (n_hidden, n_in)), WeightSpec("mm.2.weight", (n_out, n_hidden))]
        return [*specs, WeightSpec("mm.input_norm.weight", (n_in,))] if self._has("mm.input_norm") else specs

    def project(self, h: Tensor, w: Weights) -> Tensor:
        h = ops.joined_rows(self.norm(h, w, "v.post_ln"), self.n_merged)
        if w.has("mm.input_norm"):
            h = ops.layer_norm(h, w("mm.input_norm"), w.bias("mm.input_norm"), NORM_EPS)
        return self.linear(ops.gelu_erf(self.linear(h, w, "mm.1")), w, "mm.2")
