"""smollm3 (SmolLM3): as llama, but every fourth layer has no RoPE (NoPE; Yang et al. 2025,
arXiv:2501.18795)."""

from __future__ import annotations

from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.decoder import Decoder

PERIOD = 4


class Model(Decoder):
    """The weights and the graph."""

    half_split = False

    def rotate(self, x: Tensor, w: Weights, name: str, il: int) -> Tensor:
        return x if il % PERIOD == PERIOD - 1 else super().rotate(x, w, name, il)
