"""qwen3 (dense Qwen3): as qwen2 without the biases, but every head of q and k goes through an RMS norm, one
weight for all heads, before RoPE. Heads need not add up to n_embd. Yang et al. 2025, arXiv:2505.09388.
"""

from __future__ import annotations

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.base import Weights, WeightSpec
from vkbackend.models.decoder import Decoder


class Model(Decoder):
    """The weights and the graph."""

    def attention_weights(self) -> list[WeightSpec]:
        norms = [WeightSpec(name, (self.config.head_dim,)) for name in ("attn_q_norm", "attn_k_norm")]
        return [*super().attention_weights(), *norms]

    def rotate(self, x: Tensor, w: Weights, name: str) -> Tensor:
        c = self.config
        return super().rotate(ops.head_norm(x, w(f"{name}_norm"), c.head_dim, c.eps), w, name)
