"""nemotron_h (Nemotron-H, Nemotron Nano 2): each layer is attention without RoPE (if it has kv heads), an FFN
with squared ReLU and no gate (if it has FFN columns), or Mamba-2. NVIDIA 2025, arXiv:2504.03624;
arXiv:2508.14444.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vkbackend.errors import UnsupportedModel
from vkbackend.meta import ops
from vkbackend.meta.policy import Layer
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.config import Config, LayerConfig
from vkbackend.models.architectures.memory_specs import LayerMemory, MemorySpec
from vkbackend.models.architectures.reading import read_counts
from vkbackend.models.architectures.state_space import Scan, StateSpaceDecoder
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.rope import RopeTable


class Model(StateSpaceDecoder):
    pre_ffn_norm = "attn_norm"
    gated = False

    def read_config(self, gguf: GGUF) -> Config:
        self.scan = Scan.from_gguf(gguf)
        config = Config.from_gguf(gguf, self.mixture, low=0)
        widths = read_counts(gguf, "feed_forward_length", len(config.layers), low=0)
        n_target = len(config.layers) - self.n_ahead
        layers = list(map(self.one_of_three, config.layers[:n_target], widths))
        recurrent = [not layer.n_head_kv and not n for layer, n in zip(layers, widths, strict=False)]
        ahead = [False] * self.n_ahead
        self.recurrent = recurrent + ahead
        self.feeds = [n > 0 for n in widths[:n_target]] + ahead
        return replace(config, layers=(*layers, *config.layers[n_target:]))

    def one_of_three(self, layer: LayerConfig, n_ff: int) -> LayerConfig:
        if layer.n_head_kv and n_ff:
            raise UnsupportedModel(
                f"a layer with both {layer.n_head_kv} kv heads and {n_ff} FFN columns is not supported"
            )
        return replace(layer, n_ff=n_ff, mixture=layer.mixture if n_ff else None)

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        return {}

    def has_rope(self, il: int) -> bool:
        return False

    # ---- weights ----

    def attention_weights(self, il: int) -> list[WeightSpec]:
        return [] if self.feeds[il] else super().attention_weights(il)

    def feed_forward_weights(self, il: int) -> list[WeightSpec]:
        return super().feed_forward_weights(il) if self.feeds[il] else []

    def kv(self, il: int) -> MemorySpec:
        return None if self.feeds[il] else super().kv(il)

    def layer(self, il: int, types: Mapping[str, str]) -> Layer:
        if self.feeds[il]:
            return Layer(None, self.feed_forward_of(il, types), "feeds")
        if self.recurrent[il]:
            return Layer(self.scan_mixer(il, types), None, "recurrent")
        return Layer(self.attention_of(il, types), None)

    # ---- graph ----

    def block(self, h: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        if self.feeds[il]:
            return h + self.ffn(h, w, il)
        return h + self.mix(ops.rms_norm(h, w("attn_norm"), self.config.eps), w, cache, il)

    def activate_alone(self, x: Tensor, il: int) -> Tensor:
        return ops.relu2(x)
