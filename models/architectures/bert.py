"""bert (BERT, BGE, E5, MiniLM, GTE; RoBERTa and XLM-R, such as bge-m3 and bge-reranker): encoder.py with
embeddings of positions. In RoBERTa's files, the table begins with the row of the first position.
"""

from __future__ import annotations

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.encoder import Encoder
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops import POSITIONS
from vkbackend.rope import RopeTable

TABLE = "position_embd.weight"


class Model(Encoder):
    def __init__(self, gguf: GGUF) -> None:
        super().__init__(gguf)
        if len(self._shapes.get(TABLE, ())) != 2:
            raise GGUFError(f"{gguf.paths[0]}: the tensor {TABLE!r} is missing, or is no matrix")
        self.n_positions = self._shapes[TABLE][0]

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        return {}

    def ropes(self, n_ctx: int) -> dict[str, RopeTable]:
        if n_ctx > self.n_positions:
            raise UnsupportedModel(
                f"a context of {n_ctx} tokens exceeds the model's {self.n_positions} position embeddings; "
                f"use at most {self.n_positions} (-c)"
            )
        return {}

    def has_rope(self, il: int) -> bool:
        return False

    def outer_weights(self) -> list[WeightSpec]:
        return [*super().outer_weights(), WeightSpec(TABLE, (self.n_positions, self.n_embd), host=True)]

    def positioned(self, h: Tensor, w: Weights) -> Tensor:
        return h + ops.embed(h.graph, w("position_embd"), POSITIONS)
