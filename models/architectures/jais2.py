"""jais2 (Jais 2): starcoder2 with squared ReLU. Inception, MBZUAI and Cerebras 2025."""

from __future__ import annotations

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.layer_normed import LayerNormed


class Model(LayerNormed):
    gated = False

    def activate_alone(self, x: Tensor, il: int) -> Tensor:
        return ops.relu2(x)
