"""glm-dsa (GLM-5, GLM-5.2): deepseek32, but the indexer's RoPE pairs neighbours. Most layers of GLM-5.2 have
no indexer (indexed.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from vkbackend.models.architectures.indexed import IndexedAttention
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import read_flags
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import Gating


class Model(IndexedAttention):
    mixture = Mixture(gating=Gating("sigmoid", norm_w=False))

    def read_indexed(self, gguf: GGUF, n_layer: int) -> Sequence[bool]:
        """Return whether each layer has an indexer. Without the key in the file, the layer's tensors
        decide."""
        flags = read_flags(gguf, "attention.indexer.types", n_layer)
        return flags or [f"blk.{il}.indexer.attn_k.weight" in gguf.tensors for il in range(n_layer)]
