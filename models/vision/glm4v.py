"""glm4v (GLM-4.1V, 4.5V, 4.6V): qwen_vl.py with RMS norms, SwiGLU and an interpolated table of positions. A
convolution merges 2 x 2 patches, and a gated FFN follows. GLM-V team 2025, arXiv:2507.01006.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vkbackend.errors import GGUFError
from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.vision.encoder import PATCHES, POSITIONS, read_matrix
from vkbackend.models.vision.interpolation import resized_cubic
from vkbackend.models.vision.patches import patch_order
from vkbackend.models.vision.qwen_vl import QwenVL

MERGER = "mm.patch_merger.weight"
NORM_EPS = 1e-5  # epsilon of the projector's norm


class Model(QwenVL):
    """The file's `feed_forward_length` is the width of the projector's FFN. The width of the encoder's FFN
    equals the text model's width."""

    text_architectures = ("glm4", "glm4moe")
    marks = ("<|begin_of_image|>", "<|end_of_image|>")
    gated = True

    def __init__(self, gguf: GGUF) -> None:
        super().__init__(gguf)
        c = self.config
        self._n_ff, self.config = c.n_ff, replace(c, n_ff=c.projection_dim)
        shape = c.projection_dim, c.n_embd, self.merge, self.merge
        if self._shapes.get(MERGER) != shape:
            raise GGUFError(f"{self._path}: {MERGER} has shape {self._shapes.get(MERGER)}, expected {shape}")
        columns = read_matrix(gguf, MERGER).reshape(c.projection_dim, c.n_embd, self.n_merged)
        self._merger = np.ascontiguousarray(columns.transpose(0, 2, 1).reshape(c.projection_dim, -1))

    def check(self) -> None:
        self.check_square_table()

    def position_rows(self, grid: tuple[int, int]) -> np.ndarray:
        assert self.positions is not None
        return resized_cubic(self.positions, grid)[patch_order(grid, self.merge)]

    # ---- weights ----

    def unread(self) -> set[str]:
        return super().unread() | {MERGER}

    def projector_weights(self) -> list[WeightSpec]:
        n, n_ff = self.config.projection_dim, self._n_ff
        shapes = {
            "model.fc": (n, n),
            "post_norm": (n,),
            "gate": (n_ff, n),
            "up": (n_ff, n),
            "down": (n, n_ff),
        }
        specs = [WeightSpec(f"mm.{name}.weight", shape) for name, shape in shapes.items()]
        norm = WeightSpec("v.norm_embd.weight", (self.config.n_embd,))
        return [*specs, norm, WeightSpec(MERGER, self._merger.shape, values=self._merger)]

    # ---- graph ----

    def embed(self, graph: Graph, w: Weights) -> Tensor:
        patches = ops.host_rows(graph, PATCHES)
        h = self.linear(patches, w, "v.patch_embd") + ops.linear(patches, w.tensor(self.patch_weights[1]))
        return self.norm(h, w, "v.norm_embd") + ops.host_rows(graph, POSITIONS)

    def norm(self, x: Tensor, w: Weights, name: str) -> Tensor:
        return ops.rms_norm(x, w(name), self.config.eps)

    def project(self, h: Tensor, w: Weights) -> Tensor:
        h = ops.joined_rows(self.norm(h, w, "v.post_ln"), self.n_merged)
        h = self.linear(self.linear(h, w, "mm.patch_merger"), w, "mm.model.fc")
        h = ops.gelu_erf(ops.layer_norm(h, w("mm.post_norm"), w.bias("mm.post_norm"), NORM_EPS))
        gate, up = self.linear(h, w, "mm.gate"), self.linear(h, w, "mm.up")
        return self.linear(self.gated_product(gate, up), w, "mm.down")
