"""falcon-h1 (Falcon-H1): every layer adds the results of a Mamba-2 mixer and of attention, which read the
same norm. The files' weights include the paper's multipliers. Falcon-LLM team 2025, arXiv:2507.22448.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vkbackend.meta.policy import Layer
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.memory_specs import LayerMemory, LayerState, MemorySpec, kv_of
from vkbackend.models.architectures.state_space import Scan, StateSpaceDecoder
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.rope import RopeTable


class Model(StateSpaceDecoder):
    freq_factors = True

    def read_config(self, gguf: GGUF) -> Config:
        self.scan = Scan.from_gguf(gguf)
        config = super().read_config(gguf)
        self.recurrent = [True] * len(config.layers)
        return config

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        """Return the RoPE table. Some converters write frequency factors, which are ignored."""
        return {"rope": replace(super().read_ropes(gguf)["rope"], freq_factors=None)}

    def unread(self) -> set[str]:
        return super().unread() | {"rope_freqs.weight"}

    def attention_weights(self, il: int) -> list[WeightSpec]:
        return [*Decoder.attention_weights(self, il), *self.scan_weights(il)]

    def feed_forward_weights(self, il: int) -> list[WeightSpec]:
        name = self.pre_ffn_norm  # The file's name of this tensor lacks ".weight".
        return [
            replace(spec, source=f"blk.{il}.{name}") if spec.name == name else spec
            for spec in super().feed_forward_weights(il)
        ]

    def normed(self, il: int) -> bool:
        return f"blk.{il}.ssm_norm.weight" in self._shapes

    def kv(self, il: int) -> MemorySpec:
        return replace(self.state(il), kv=kv_of(Decoder.kv(self, il)))

    def layer(self, il: int, types: Mapping[str, str]) -> Layer:
        return replace(Decoder.layer(self, il, types), parallel=self.scan_mixer(il, types))

    def mix(self, x: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        assert isinstance(cache, LayerState) and cache.cache, f"layer {il} remembers both"
        return self.attention(x, w, cache.cache, il) + self.scanned(x, w, cache)
