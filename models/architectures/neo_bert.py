"""neo-bert (NeoBERT): decoder.py, in which every token attends to all others, with RoPE on adjacent pairs. Le
Breton et al. 2025, arXiv:2502.19587.
"""

from __future__ import annotations

from dataclasses import replace

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.weight_specs import WeightSpec

NORM = "enc.output_norm"


class Model(Decoder):
    causal = False
    half_split = False

    def outer_weights(self) -> list[WeightSpec]:
        table, norm = super().outer_weights()
        return [table, replace(norm, name=f"{NORM}.weight")]

    def output_norm(self, x: Tensor, w: Weights) -> Tensor:
        return ops.rms_norm(x, w(NORM), self.config.eps)
