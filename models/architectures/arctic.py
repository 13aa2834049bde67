"""arctic (Snowflake Arctic): llama plus experts. The experts read the layer's input, parallel to attention
and the dense FFN. The dense FFN has n_embd columns. Snowflake 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vkbackend.formats import block_of
from vkbackend.meta import ops
from vkbackend.meta.policy import FeedForward
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.memory_specs import LayerMemory
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import read_count
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF

EXPERTS_NORM = "ffn_norm_exps"


class Model(Decoder):
    mixture = Mixture()
    half_split = False

    def read_config(self, gguf: GGUF) -> Config:
        read_count(gguf, "expert_count")  # Optional in `read_mixtures`.
        c = super().read_config(gguf)
        return replace(c, layers=tuple(replace(layer, n_ff=c.n_embd) for layer in c.layers))

    def feed_forward_weights(self, il: int) -> list[WeightSpec]:
        norm = WeightSpec(EXPERTS_NORM, (self.config.n_embd,))
        return [*super().feed_forward_weights(il), *self.dense_weights(il), norm]

    def feed_forward_of(self, il: int, types: Mapping[str, str]) -> FeedForward:
        block = block_of(types[f"blk.{il}.ffn_down.weight"])[0]
        n_ff = self.config.layers[il].n_ff
        return replace(super().feed_forward_of(il, types), n_ff_shared=n_ff, shared_block=block)

    def block(self, h: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        eps, mixture = self.config.eps, self.config.layers[il].mixture
        assert mixture
        norm = w(EXPERTS_NORM)
        routed = mixture.forward(ops.rms_norm(h, norm, eps), h, norm, w, eps)
        h = h + self.mix(self.attention_input(h, w, il), w, cache, il)
        dense = self.feed_forward(ops.rms_norm(h, w(self.pre_ffn_norm), eps), w, il)
        return h + (dense + routed)
