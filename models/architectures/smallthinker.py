"""smallthinker (SmallThinker 4B-A0.6B, 21B-A3B): the router reads a layer's input without a norm, so experts
are known before attention. The experts' activation is ReGLU. Three of four layers have a window and RoPE, and
the first of four has neither. Without a window, every layer has RoPE. Song et al. 2025, arXiv:2507.20984.
"""

from __future__ import annotations

import numpy as np

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.config import Config, with_windows
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.memory_specs import LayerMemory
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import read_count
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import UNNORMED

PERIOD = 4
ONES = "router_ones"


class Model(Decoder):
    mixture = Mixture(act="relu")
    windows = True

    def read_config(self, gguf: GGUF) -> Config:
        read_count(gguf, "expert_count")  # Optional in `read_mixtures`.
        c = super().read_config(gguf)
        window = int(gguf.u32("smallthinker.attention.sliding_window", 0))
        self.local = [not window or il % PERIOD > 0 for il in range(len(c.layers))]
        return with_windows(c, window, self.local)

    def has_rope(self, il: int) -> bool:
        return self.local[il]

    def expert_weights(self, il: int) -> list[WeightSpec]:
        ones = np.ones(self.config.n_embd, np.float32)
        return [*super().expert_weights(il), WeightSpec(ONES, ones.shape, values=ones)]

    def block(self, h: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        mixture = self.config.layers[il].mixture
        assert mixture
        g = h + self.mix(self.attention_input(h, w, il), w, cache, il)
        x = ops.rms_norm(g, w(self.pre_ffn_norm), self.config.eps)
        return g + mixture.forward(x, h, w(ONES), w, UNNORMED)
