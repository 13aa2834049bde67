"""nomic-bert-moe (nomic-embed-text 2): encoder.py with RoPE, and experts in every second layer. Nussbaum and
Duderstadt 2025, arXiv:2502.07972.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.encoder import Encoder
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import read_count
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import UNNORMED, Gating

ONES = "ffn_ones"  # the router reads the residual, which is normed already


class Model(Encoder):
    mixture: Mixture | None = Mixture(gating=Gating(norm_w=False), act="gelu_alone")

    def read_config(self, gguf: GGUF) -> Config:
        c, period = super().read_config(gguf), read_count(gguf, "moe_every_n_layers")
        layers = [
            replace(layer, mixture=layer.mixture if il % period == 1 else None)
            for il, layer in enumerate(c.layers)
        ]
        n_ff = read_count(gguf, "feed_forward_length")
        return replace(c, layers=tuple(replace(layer, n_ff=n_ff) for layer in layers))

    def feed_forward_weights(self, il: int) -> list[WeightSpec]:
        specs = super().feed_forward_weights(il)
        if not self.config.layers[il].mixture:
            return specs
        return [*specs, WeightSpec(ONES, (self.n_embd,), values=np.ones(self.n_embd, np.float32))]

    def ffn(self, h: Tensor, w: Weights, il: int) -> Tensor:
        if (mixture := self.config.layers[il].mixture) is None:
            return self.feed_forward(h, w, il)
        h = ops.same_bits(h)  # rounding must not change the choice of experts
        return mixture.forward(h, h, w(ONES), w, UNNORMED)
