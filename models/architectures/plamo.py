"""plamo (PLaMo-13B): attention and FFN read the same RMS norm, and their results are added. Preferred
Networks 2023.
"""

from __future__ import annotations

from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.memory_specs import LayerMemory
from vkbackend.models.architectures.weight_specs import WeightSpec


class Model(Decoder):
    parallel = True

    def feed_forward_weights(self, il: int) -> list[WeightSpec]:
        return self.dense_weights(il)

    def block(self, h: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        x = self.attention_input(h, w, il)
        return h + self.mix(x, w, cache, il) + self.feed_forward(x, w, il)
