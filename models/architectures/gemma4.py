"""gemma4 (Gemma 4): gemma3 with normed values (per_layer.py). Attention does not scale q k^T, and a factor
multiplies every layer's result. Layers without a window have another head size. Layers without attn_v use
their keys as values.

Small models have shared caches and a token embedding per layer (per_layer.py). Large models have experts in
addition to the dense FFN, with separate norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from vkbackend.errors import GGUFError
from vkbackend.formats import block_of
from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.policy import Layer
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures import gemma3
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.memory_specs import LayerMemory
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.per_layer import PerLayerInputs
from vkbackend.models.architectures.reading import (
    read_count,
    read_counts,
    read_factors,
    read_float,
    read_rope,
    read_windowed,
)
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.rope import RopeTable


class Model(PerLayerInputs):
    freq_factors = True
    mixture = Mixture(act="gelu")

    def __init__(self, gguf: GGUF) -> None:
        super().__init__(gguf)
        names = [f"blk.{il}.layer_output_scale.weight" for il in range(self.n_layer)]
        self.factors = [float(_vector(gguf, n, 1)[0]) if n in gguf.tensors else 1.0 for n in names]
        self.router_norms = {  # The router reads norm(h) * scale / sqrt(n_embd).
            il: _vector(gguf, f"blk.{il}.ffn_gate_inp.scale", self.n_embd) * np.float32(self.n_embd**-0.5)
            for il, layer in enumerate(self.config.layers)
            if layer.mixture
        }

    def read_config(self, gguf: GGUF) -> Config:
        c = Decoder.read_config(self, gguf)
        window = read_count(gguf, "attention.sliding_window")
        pattern = read_windowed(gguf, len(c.layers), gemma3.PERIOD)
        n_ff = read_counts(gguf, "feed_forward_length", len(c.layers))
        layers = []
        for layer, local, width in zip(c.layers, pattern, n_ff, strict=True):
            layer = replace(layer, scale=1.0, n_ff=width)
            if local:
                dim = read_count(gguf, "attention.key_length_swa", layer.head_dim)
                n_rot = read_count(gguf, "rope.dimension_count_swa", dim)
                layer = replace(layer, head_dim=dim, head_dim_v=dim, n_rot=n_rot, rope="rope_swa")
                layer = replace(layer, window=window)
            layers.append(layer)
        return replace(
            c, layers=tuple(layers), softcap=read_float(gguf, "final_logit_softcapping", 0.0, low=0.0)
        )

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        widths = {layer.rope: layer.n_rot for layer in self.config.layers}
        n_ctx = self.config.n_ctx_train
        tables = {}
        if n_rot := widths.get("rope"):
            tables["rope"] = read_rope(gguf, n_rot, n_ctx, read_factors(gguf, "rope_freqs.weight"))
        if n_rot := widths.get("rope_swa"):
            tables["rope_swa"] = RopeTable(n_rot, read_float(gguf, "rope.freq_base_swa", 10_000.0))
        return tables

    # ---- weights ----

    def unread(self) -> set[str]:
        scales = "layer_output_scale.weight", "ffn_gate_inp.scale"
        return super().unread() | {f"blk.{il}.{name}" for il in range(self.n_layer) for name in scales}

    def attention_weights(self, il: int) -> list[WeightSpec]:
        absent = set() if f"blk.{il}.attn_v.weight" in self._shapes else {"attn_v"}
        return [spec for spec in super().attention_weights(il) if spec.name not in absent]

    def feed_forward_weights(self, il: int) -> list[WeightSpec]:
        n_embd = self.n_embd
        specs = [*super().feed_forward_weights(il), *self.embedding_weights()]
        if not self.config.layers[il].mixture:
            return specs
        norms = ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2")
        specs += [*self.dense_weights(il), *(WeightSpec(name, (n_embd,)) for name in norms)]
        return [*specs, WeightSpec("router_norm", (n_embd,), values=self.router_norms[il])]

    def layer(self, il: int, types: Mapping[str, str]) -> Layer:
        layer, c = super().layer(il, types), self.config.layers[il]
        if not c.mixture or not layer.ffn:
            return layer
        block = block_of(types[f"blk.{il}.ffn_down.weight"])[0]
        return replace(layer, ffn=replace(layer.ffn, n_ff_shared=c.n_ff, shared_block=block))

    # ---- graph ----

    def residual(self, graph: Graph, w: Weights, caches: list[LayerMemory]) -> Tensor:
        h = self.embedded(graph, w)
        per_layer = self.per_layer(h, graph, w) if self.n_embd_layer else None
        for il, cache in graph.recorded_layers(caches):
            with graph.scope(f"blk.{il}"):
                wl = w.layer(il)
                before, h = h, self.block(h, wl, cache, il)
                if per_layer:
                    h = h + self.gated_embedding(h, per_layer, wl, il)
                h = ops.scale(h, self.factors[il]) if self.factors[il] != 1.0 else h
                h = self.steered(h, wl, il)
                self.tap(before, il)
        return h

    def sees_end(self, il: int) -> bool:
        return self.config.layers[il].window > 0

    def ffn(self, h: Tensor, w: Weights, il: int) -> Tensor:
        eps, mixture = self.config.eps, self.config.layers[il].mixture
        if not mixture:
            return super().ffn(h, w, il)
        dense = self.feed_forward(ops.rms_norm(h, w("ffn_norm"), eps), w, il)
        x = ops.rms_norm(h, w("pre_ffw_norm_2"), eps)
        routed = mixture.forward(x, h, w("router_norm"), w, eps)
        ops.together(dense, routed)
        dense = ops.rms_norm(dense, w("post_ffw_norm_1"), eps)
        return dense + ops.rms_norm(routed, w("post_ffw_norm_2"), eps)


def _vector(gguf: GGUF, name: str, n: int) -> np.ndarray:
    info = gguf.tensors.get(name)
    if info is None or (info.type, info.shape) != ("f32", (n,)):
        actual = f"{info.type} {info.shape}" if info else "missing"
        raise GGUFError(f"{gguf.paths[0]}: the tensor {name!r} is {actual}, expected f32 ({n},)")
    return gguf.data(name).view("<f4")
