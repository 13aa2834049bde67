"""afmoe (Trinity): exaone-moe with embeddings multiplied by sqrt(n_embd), an attention output gate, and norms
after attention and FFN. Arcee AI 2025.
"""

from __future__ import annotations

import math

from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.plan import rows
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures import exaone_moe
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.weight_specs import WeightSpec


class Model(exaone_moe.Model):
    freq_factors = False
    post_norms = True

    def attention_weights(self, il: int) -> list[WeightSpec]:
        layer, n_embd = self.config.layers[il], self.config.n_embd
        gate = WeightSpec("attn_gate", (layer.n_head * layer.head_dim_v, n_embd), rows("heads"))
        return [*super().attention_weights(il), gate]

    def embed(self, graph: Graph, w: Weights) -> Tensor:
        return ops.scale(super().embed(graph, w), math.sqrt(self.n_embd))

    def gate(self, a: Tensor, x: Tensor, w: Weights) -> Tensor:
        return ops.sigmoid_mul(linear(x, w, "attn_gate"), a)
