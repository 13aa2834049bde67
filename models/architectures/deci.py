"""deci (Llama-Nemotron Super 49B, Ultra 253B, Nemotron 51B, DeciLM): llama whose layers differ in kv
heads and FFN columns. A layer may lack attention, the FFN or both. A layer with heads but no kv heads has
one matrix instead of attention. Bercovich et al. 2024, arXiv:2411.19146.
"""

from __future__ import annotations

from collections.abc import Mapping

from vkbackend.meta.policy import Layer
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures import llama
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.memory_specs import KeyRotation, LayerMemory, MemorySpec
from vkbackend.models.architectures.reading import read_counts
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF


class Model(llama.Model):
    mixture = None

    def read_config(self, gguf: GGUF) -> Config:
        config = Config.from_gguf(gguf, low=0)
        heads = read_counts(gguf, "attention.head_count", len(config.layers), low=0)
        self.mixes = [n > 0 for n in heads]
        self.attends = [n > 0 and layer.n_head_kv > 0 for n, layer in zip(heads, config.layers, strict=True)]
        return config

    # ---- weights ----

    def attention_weights(self, il: int) -> list[WeightSpec]:
        if self.attends[il]:
            return super().attention_weights(il)
        n_embd = self.config.n_embd
        specs = [WeightSpec("attn_norm", (n_embd,)), WeightSpec("attn_output", (n_embd, n_embd))]
        return specs if self.mixes[il] else []

    def feed_forward_weights(self, il: int) -> list[WeightSpec]:
        return super().feed_forward_weights(il) if self.config.layers[il].n_ff else []

    def kv(self, il: int) -> MemorySpec:
        return super().kv(il) if self.attends[il] else None

    def key_rotation(self, il: int) -> KeyRotation | None:
        return super().key_rotation(il) if self.attends[il] else None

    def layer(self, il: int, types: Mapping[str, str]) -> Layer:
        attends, feeds = self.attends[il], self.config.layers[il].n_ff > 0
        return Layer(
            self.attention_of(il, types) if attends else None,
            self.feed_forward_of(il, types) if feeds else None,
            "" if attends and feeds else f"attends {attends} feeds {feeds}",
        )

    # ---- graph ----

    def block(self, h: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        if self.mixes[il]:
            h = h + self.mix(self.attention_input(h, w, il), w, cache, il)
        return h + self.ffn(h, w, il) if self.config.layers[il].n_ff else h

    def mix(self, x: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        return super().mix(x, w, cache, il) if self.attends[il] else linear(x, w, "attn_output")
