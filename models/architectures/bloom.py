"""bloom (BLOOM, BLOOMZ): layer norms, ALiBi, and biases in all layers. The embeddings are normalized, too.
The FFN has GELU and no gate. BigScience 2022, arXiv:2211.05100.
"""

from __future__ import annotations

from vkbackend.meta.graph import Graph
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.alibi import Alibi
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.layer_normed import LayerNormed
from vkbackend.models.architectures.weight_specs import WeightSpec


class Model(Alibi, LayerNormed):
    gated = False

    def outer_weights(self) -> list[WeightSpec]:
        norm = WeightSpec("token_embd_norm.weight", (self.config.n_embd,))
        return [*super().outer_weights(), *self.norm_weights([norm], "")]

    def embed(self, graph: Graph, w: Weights) -> Tensor:
        return self.norm(super().embed(graph, w), w, "token_embd_norm")
