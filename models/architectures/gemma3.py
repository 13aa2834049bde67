"""gemma3 (Gemma 3): gemma with norms of q and k heads, norms after attention and FFN, and in some models a
soft-cap of the logits.

Five of six layers have a window, another RoPE base and no RoPE scaling. Gemma team 2025, arXiv:2503.19786.
"""

from __future__ import annotations

import math
from dataclasses import replace

from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.reading import read_float, read_windowed
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.rope import RopeTable

PERIOD = 6
N_LAYER_27B = 62  # Only this size scales q k^T by a factor other than head_dim^-0.5. Files lack the factor.


class Model(Decoder):
    post_norms = True
    windows = True

    def read_config(self, gguf: GGUF) -> Config:
        c = super().read_config(gguf)
        window = int(gguf.u32(f"{gguf.architecture}.attention.sliding_window", 0))
        layers = list(c.layers)
        windowed = read_windowed(gguf, len(layers), PERIOD)
        for il, layer in enumerate(layers):
            if len(layers) == N_LAYER_27B and f"{gguf.architecture}.attention.scale" not in gguf.metadata:
                layer = replace(layer, scale=(c.n_embd / layer.n_head) ** -0.5)
            local = window and windowed[il]
            layers[il] = replace(layer, window=window, rope="rope_swa") if local else layer
        return replace(
            c, layers=tuple(layers), softcap=read_float(gguf, "final_logit_softcapping", 0.0, low=0.0)
        )

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        tables = super().read_ropes(gguf)
        base = read_float(gguf, "rope.freq_base_swa", 10_000.0)
        return tables | {"rope_swa": RopeTable(tables["rope"].n_rot, base)}

    def attention_weights(self, il: int) -> list[WeightSpec]:
        return [*super().attention_weights(il), *self.head_norm_weights(il)]

    def embed(self, graph: Graph, w: Weights) -> Tensor:
        return ops.scale(super().embed(graph, w), math.sqrt(self.n_embd))

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return ops.gelu_mul(gate, up)
