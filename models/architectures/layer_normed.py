"""Decoders with layer norms (Ba et al. 2016, arXiv:1607.06450), with or without biases."""

from __future__ import annotations

from dataclasses import replace

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.memory_specs import LayerMemory
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF


class LayerNormed(Decoder):
    """If `parallel`, attention and FFN both read the layer's input, and their results are added. They share
    one norm unless `norms_apart`."""

    parallel = False
    norms_apart = False

    def read_config(self, gguf: GGUF) -> Config:
        return Config.from_gguf(gguf, self.mixture, norm_key="layer_norm_epsilon")

    def norm(self, x: Tensor, w: Weights, name: str) -> Tensor:
        return ops.layer_norm(x, w(name), w.get(f"{name}.bias"), self.config.eps)

    def norm_weights(self, specs: list[WeightSpec], prefix: str) -> list[WeightSpec]:
        """Add the norms' biases that the file has; drop the FFN's norm if attention's norm replaces it."""
        kept = []
        for spec in specs:
            if self.parallel and not self.norms_apart and spec.name == self.pre_ffn_norm:
                continue
            kept.append(spec)
            bias = f"{spec.name.removesuffix('.weight')}.bias"
            if (
                spec.name.removesuffix(".weight").endswith(("_norm", "_norm_2"))
                and prefix + bias in self._shapes
            ):
                kept.append(replace(spec, name=bias))
        return kept

    def attention_weights(self, il: int) -> list[WeightSpec]:
        return self.norm_weights(super().attention_weights(il), f"blk.{il}.")

    def feed_forward_weights(self, il: int) -> list[WeightSpec]:
        return self.norm_weights(super().feed_forward_weights(il), f"blk.{il}.")

    def outer_weights(self) -> list[WeightSpec]:
        return self.norm_weights(super().outer_weights(), "")

    def attention_input(self, h: Tensor, w: Weights, il: int) -> Tensor:
        return self.norm(h, w, "attn_norm") if self.pre_norms else h

    def block(self, h: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        x = self.attention_input(h, w, il)
        a = self.mix(x, w, cache, il)
        if self.parallel and not self.norms_apart:
            return h + a + self.feed_forward(x, w, il)
        if not self.parallel:
            h = h + a
        f = self.feed_forward(self.norm(h, w, self.pre_ffn_norm), w, il)
        return h + a + f if self.parallel else h + f

    def output_norm(self, x: Tensor, w: Weights) -> Tensor:
        return self.norm(x, w, "output_norm")
