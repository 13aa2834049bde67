"""qwen3 (dense Qwen3): qwen2 without biases, and with an RMS norm of each head of q and k before RoPE.
`n_head * head_dim` may differ from `n_embd`. Yang et al. 2025, arXiv:2505.09388.
"""

from __future__ import annotations

from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.weight_specs import WeightSpec


class Model(Decoder):
    def attention_weights(self, il: int) -> list[WeightSpec]:
        return [*super().attention_weights(il), *self.head_norm_weights(il)]
