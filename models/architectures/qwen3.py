"""qwen3 (dense Qwen3): as qwen2 without the biases, but every head of q and k goes through an RMS norm, one
weight for all heads, before RoPE. Heads need not add up to n_embd. Yang et al. 2025, arXiv:2505.09388.
"""

from __future__ import annotations

from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.weight_specs import WeightSpec


class Model(Decoder):
    def attention_weights(self, il: int) -> list[WeightSpec]:
        return [*super().attention_weights(il), *self.head_norm_weights(il)]
