"""qwen3vl_merger (Qwen3-VL, Qwen3.5, 3.6, 3.8): an interpolated table of positions, and deepstack. With
deepstack, the outputs of some layers are merged, too, and the text model adds them after its first layers.
Qwen3-VL Technical Report, arXiv:2511.21631; Meng et al. 2024, arXiv:2406.04334.
"""

from __future__ import annotations

import numpy as np

from vkbackend.errors import GGUFError
from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.vision.interpolation import resized
from vkbackend.models.vision.patches import patch_order
from vkbackend.models.vision.qwen_vl import QwenVL


class Model(QwenVL):
    text_architectures = ("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe")

    def check(self) -> None:
        self.check_square_table()
        if self.config.deepstack and max(self.config.deepstack) >= self.n_layer:
            raise GGUFError(f"{self._path}: clip.vision.is_deepstack_layers names layers that the file lacks")

    def position_rows(self, grid: tuple[int, int]) -> np.ndarray:
        assert self.positions is not None
        rows = resized(self.positions, grid, align_corners=True, antialias=False)
        return rows[patch_order(grid, self.merge)]

    def projector_weights(self) -> list[WeightSpec]:
        n_in, n_out = self.n_merged * self.config.n_embd, self.config.projection_dim
        specs = super().projector_weights()
        for il in self.config.deepstack:
            specs.append(WeightSpec(f"v.deepstack.{il}.norm.weight", (n_in,)))
            specs.append(WeightSpec(f"v.deepstack.{il}.fc1.weight", (n_in, n_in)))
            specs.append(WeightSpec(f"v.deepstack.{il}.fc2.weight", (n_out, n_in)))
        return specs

    def after(self, h: Tensor, w: Weights, il: int) -> None:
        if il not in self.config.deepstack:
            return
        at = f"v.deepstack.{il}"
        x = self.norm(ops.joined_rows(h, self.n_merged), w, f"{at}.norm")
        x = linear(ops.gelu_erf(linear(x, w, f"{at}.fc1")), w, f"{at}.fc2")
        ops.hidden_states(x, (1 + self.config.deepstack.index(il)) * x.rows)
