"""muse-glimmer (Muse Glimmer 30B, its text part): three of four layers have a window and RoPE, and the
fourth has neither. A gate multiplies attention's result. Embeddings are normed, norms follow attention
and FFN, and logits are scaled and soft-capped. Meta 2026.
"""

from __future__ import annotations

from dataclasses import replace

from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.plan import rows
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.config import Config, with_windows
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.memory_specs import LayerMemory
from vkbackend.models.architectures.reading import read_count, read_float, read_windowed
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF

PERIOD = 4
POST_EPS = 1e-8  # epsilon of the norms after attention and FFN, which files do not state


class Model(Decoder):
    windows = True
    half_split = False
    post_norms = True

    def read_config(self, gguf: GGUF) -> Config:
        c = super().read_config(gguf)
        self.logit_scale = read_float(gguf, "logit_scale", 1.0)
        self.local = read_windowed(gguf, len(c.layers), PERIOD)
        softcap = read_float(gguf, "final_logit_softcapping", 0.0, low=0.0)
        window = read_count(gguf, "attention.sliding_window")
        return replace(with_windows(c, window, self.local), softcap=softcap)

    def attention_weights(self, il: int) -> list[WeightSpec]:
        layer, n_embd = self.config.layers[il], self.config.n_embd
        gate = WeightSpec("attn_gate", (layer.n_head * layer.head_dim_v, n_embd), rows("heads"))
        return [*super().attention_weights(il), *self.head_norm_weights(il), gate]

    def has_rope(self, il: int) -> bool:
        return self.local[il]

    def embed(self, graph: Graph, w: Weights) -> Tensor:
        return ops.head_norm(super().embed(graph, w), None, self.n_embd, self.config.eps)

    def block(self, h: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        a = self.mix(self.attention_input(h, w, il), w, cache, il)
        h = h + ops.rms_norm(a, w("post_attention_norm"), POST_EPS)
        return h + ops.rms_norm(self.ffn(h, w, il), w("post_ffw_norm"), POST_EPS)

    def gate(self, a: Tensor, x: Tensor, w: Weights) -> Tensor:
        return ops.sigmoid_mul(linear(x, w, "attn_gate"), a)

    def scaled(self, x: Tensor) -> Tensor:
        return ops.scale(x, self.logit_scale)
