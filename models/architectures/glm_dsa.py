"""glm-dsa (GLM-5, GLM-5.2): deepseek32, but the indexer's RoPE pairs neighbours. Most layers of GLM-5.2 have
no indexer (indexed.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from vkbackend.models.architectures.indexed import IndexedAttention, layers_with_indexer
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import Gating


class Model(IndexedAttention):
    mixture = Mixture(gating=Gating("sigmoid", norm_w=False))

    def read_indexed(self, gguf: GGUF, n_layer: int) -> Sequence[bool]:
        return layers_with_indexer(gguf, n_layer)
