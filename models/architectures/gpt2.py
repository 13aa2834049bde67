"""gpt2 (GPT-2): starcoder2 with position embeddings instead of RoPE. Their number limits the context. Radford
et al. 2019.
"""

from __future__ import annotations

from vkbackend.errors import UnsupportedModel
from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.layer_normed import LayerNormed
from vkbackend.models.architectures.memory_specs import KeyRotation
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops import POSITIONS
from vkbackend.rope import RopeTable


class Model(LayerNormed):
    gated = False

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        return {}

    def ropes(self, n_ctx: int) -> dict[str, RopeTable]:
        if n_ctx > self.n_ctx_train:
            raise UnsupportedModel(
                f"a context of {n_ctx} tokens exceeds the model's {self.n_ctx_train} position embeddings; "
                f"use at most {self.n_ctx_train} (-c)"
            )
        return {}

    def has_rope(self, il: int) -> bool:
        return False

    def key_rotation(self, il: int) -> KeyRotation | None:
        raise UnsupportedModel("keys contain position embeddings")

    def weights(self) -> list[WeightSpec]:
        positions = WeightSpec("position_embd.weight", (self.n_ctx_train, self.n_embd), host=True)
        return [*super().weights(), positions]

    def embed(self, graph: Graph, w: Weights) -> Tensor:
        return super().embed(graph, w) + ops.embed(graph, w("position_embd"), POSITIONS)
