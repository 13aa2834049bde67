"""granite (Granite 3, dense): llama with the factors of muP (Yang et al. 2022, arXiv:2203.03466). Embeddings,
q k^T and the results of attention and FFN are multiplied by factors, and the logits are divided by a factor.
Granite team 2024, "Granite 3.0 Language Models".
"""

from __future__ import annotations

from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.memory_specs import LayerMemory
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import check_off, read_float
from vkbackend.models.gguf.reader import GGUF


class Model(Decoder):
    mixture: Mixture | None = None
    half_split = False

    def read_config(self, gguf: GGUF) -> Config:
        check_off(gguf, "rope.scaling.finetuned", True)
        self.read_multipliers(gguf)
        return super().read_config(gguf)

    def read_multipliers(self, gguf: GGUF) -> None:
        self.embedding_scale = read_float(gguf, "embedding_scale", 1.0)
        self.residual_scale = read_float(gguf, "residual_scale", 1.0)
        self.logit_scale = read_float(gguf, "logit_scale", 1.0)

    def embed(self, graph: Graph, w: Weights) -> Tensor:
        return ops.scale(super().embed(graph, w), self.embedding_scale)

    def mix(self, x: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        return ops.scale(super().mix(x, w, cache, il), self.residual_scale)

    def ffn(self, h: Tensor, w: Weights, il: int) -> Tensor:
        return ops.scale(super().ffn(h, w, il), self.residual_scale)

    def scaled(self, x: Tensor) -> Tensor:
        return ops.scale(x, 1 / self.logit_scale)
