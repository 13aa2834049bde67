"""gemma (Gemma 1): llama with half-split RoPE, embeddings multiplied by sqrt(n_embd), and GELU (tanh) in the
FFN. Files store each norm's weight w as 1 + w. Gemma team 2024, arXiv:2403.08295.
"""

from __future__ import annotations

import math

from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.decoder import Decoder


class Model(Decoder):
    def embed(self, graph: Graph, w: Weights) -> Tensor:
        return ops.scale(super().embed(graph, w), math.sqrt(self.n_embd))

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return ops.gelu_mul(gate, up)
