"""arcee (AFM-4.5B): llama, but the FFN has no gate, and its activation is squared ReLU. Arcee AI 2025."""

from __future__ import annotations

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.decoder import Decoder


class Model(Decoder):
    freq_factors = True
    half_split = False
    gated = False

    def activate_alone(self, x: Tensor, il: int) -> Tensor:
        return ops.relu2(x)
