"""Decoders whose layers are a recurrent mixer alone, without attention, FFN and RoPE."""

from __future__ import annotations

from collections.abc import Sequence

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.config import Config, LayerConfig
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.memory_specs import LayerMemory
from vkbackend.models.architectures.reading import read_n_layer
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.rope import RopeTable

ALONE = LayerConfig(n_head=0, n_head_kv=0, head_dim=0, head_dim_v=0, n_ff=0, scale=0.0, n_rot=0)


class MixersAlone(Decoder):
    recurrent: Sequence[bool]

    def read_config(self, gguf: GGUF) -> Config:
        n_layer = read_n_layer(gguf)
        self.recurrent = [True] * n_layer
        return Config.from_gguf(gguf, layers=(ALONE,) * n_layer)

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        return {}

    def feed_forward_weights(self, il: int) -> list[WeightSpec]:
        return []

    def block(self, h: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        return h + self.mix(ops.rms_norm(h, w("attn_norm"), self.config.eps), w, cache, il)
