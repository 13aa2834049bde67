"""starcoder2 (StarCoder 2): decoder.py with layer norms and biases in all layers. The FFN has no gate, and
its activation is GELU. Lozhkov et al. 2024, arXiv:2402.19173.
"""

from __future__ import annotations

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.layer_normed import LayerNormed
from vkbackend.models.architectures.weight_specs import WeightSpec


class Model(LayerNormed):
    def dense_weights(self, il: int) -> list[WeightSpec]:
        return [spec for spec in super().dense_weights(il) if spec.name != "ffn_gate"]

    def feed_forward(self, x: Tensor, w: Weights, il: int) -> Tensor:
        return linear(ops.gelu(linear(x, w, "ffn_up")), w, "ffn_down")
