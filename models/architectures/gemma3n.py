"""gemma3n (Gemma 3n): gemma3 with per-layer embeddings, shared caches and normed values (per_layer.py). The
residual has several streams (AltUp; Baykal et al. 2023, arXiv:2301.13310), and a layer reads the first
stream. A low-rank product is added to attention's result (LAuReL; Menghani et al. 2024, arXiv:2411.07501).
The first layers set all but the largest FFN gates to 0. Gemma team 2025.
"""

from __future__ import annotations

import math
from dataclasses import replace

from vkbackend.errors import GGUFError
from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.ops import streams
from vkbackend.meta.ops.heads import mat_heads
from vkbackend.meta.ops.wide import gaussian_topk
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.config import Config, with_windows
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.memory_specs import LayerMemory
from vkbackend.models.architectures.per_layer import PerLayerInputs
from vkbackend.models.architectures.reading import check_off, read_count, read_float, read_windowed
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF

PERIOD = 5
N_STREAM = 4
RANK = 64  # LAuReL's default rank


class Model(PerLayerInputs):
    residual_is_wide = True  # several streams

    def __init__(self, gguf: GGUF) -> None:
        super().__init__(gguf)
        check_off(gguf, "altup.active_idx")
        read_count(gguf, "embedding_length_per_layer_input")
        self.n_stream = read_count(gguf, "altup.num_inputs", N_STREAM, limit=8)
        self.rank = self._shapes.get("blk.0.laurel_l.weight", (RANK,))[0]
        self.cuts = [float(c) for c in gguf.floats("gemma3n.activation_sparsity_scale")]
        if len(self.cuts) < self.n_layer:
            raise GGUFError(
                f"{gguf.paths[0]}: gemma3n.activation_sparsity_scale has {len(self.cuts)} values for "
                f"{self.n_layer} layers"
            )

    def read_config(self, gguf: GGUF) -> Config:
        c = Decoder.read_config(self, gguf)
        local = read_windowed(gguf, len(c.layers), PERIOD)
        c = with_windows(c, read_count(gguf, "attention.sliding_window"), local)
        layers = [
            replace(layer, scale=1.0, rope="rope_swa" if is_local else "rope")
            for layer, is_local in zip(c.layers, local, strict=True)
        ]
        cap = read_float(gguf, "final_logit_softcapping", 30.0, low=0.0)
        return replace(c, layers=tuple(layers), softcap=cap)

    # ---- weights ----

    def weights(self) -> list[WeightSpec]:
        n, others = self.n_embd, self.n_stream - 1
        stacks = "altup_proj.weight", "altup_unembd_proj.weight"
        return [*super().weights(), *(WeightSpec(name, (others * n, n), stacked=others) for name in stacks)]

    def feed_forward_weights(self, il: int) -> list[WeightSpec]:
        n, m, rank = self.n_embd, self.n_stream, self.rank
        return [
            *super().feed_forward_weights(il),
            *self.embedding_weights(),
            WeightSpec("altup_router_norm", (n,)),
            WeightSpec("altup_router", (m, n)),
            WeightSpec("altup_predict_coef", (m * m, m), f32=True),
            WeightSpec("altup_correct_coef", (m, m), f32=True),
            WeightSpec("altup_correct_scale", (n,)),
            WeightSpec("laurel_l", (rank, n)),
            WeightSpec("laurel_r", (n, rank)),
            WeightSpec("laurel_post_norm", (n,)),
        ]

    # ---- graph ----

    def forward(self, graph: Graph, w: Weights, caches: list[LayerMemory]) -> None:
        x = self.embedded(graph, w)
        per_layer = self.per_layer(x, graph, w)
        h = streams.streams_of(x, linear(x, w, "altup_proj"))
        for il, cache in graph.recorded_layers(caches):
            with graph.scope(f"blk.{il}"):
                wl = w.layer(il)
                coefficients = wl("altup_predict_coef")
                h = streams.predict(h, self.modes(self.first(h), wl), coefficients, 1 / self.n_embd)
                block = self.block(self.first(h), wl, cache, il)
                factors = wl("altup_correct_coef"), wl("altup_correct_scale"), 1 / self.n_embd
                h, x = streams.correct(h, block, self.modes(block, wl), *factors)
                h = streams.add_to_others(h, self.gated_embedding(x, per_layer, wl, il))
                h = self.steered(h, wl, il)
        self.head(h, graph, w)

    def first(self, h: Tensor) -> Tensor:
        return ops.columns(h, 0, self.n_embd)

    def modes(self, x: Tensor, w: Weights) -> Tensor:
        """Return the router's values per row, which predict and correct all streams."""
        return linear(ops.rms_norm(x, w("altup_router_norm"), self.config.eps), w, "altup_router")

    def block(self, h: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        eps = self.config.eps
        x = ops.rms_norm(h, w("attn_norm"), eps)
        low = linear(linear(x, w, "laurel_l"), w, "laurel_r")
        low_rank = x + ops.rms_norm(low, w("laurel_post_norm"), eps)
        a = ops.rms_norm(self.mix(x, w, cache, il), w("post_attention_norm"), eps)
        h = ops.scale(h + a + low_rank, 0.5**0.5)
        return h + ops.rms_norm(self.ffn(h, w, il), w("post_ffw_norm"), eps)

    def feed_forward(self, x: Tensor, w: Weights, il: int) -> Tensor:
        gate, up = linear(x, w, "ffn_gate"), linear(x, w, "ffn_up")
        if math.isfinite(self.cuts[il]):
            gate = gaussian_topk(gate, self.cuts[il])
        return linear(self.activate(gate, up), w, "ffn_down")

    def steered(self, h: Tensor, w: Weights, il: int) -> Tensor:
        return streams.add_to_all(h, w("control_vector")) if il in self.control else h

    def hidden_outputs(self, h: Tensor, w: Weights) -> Tensor:
        """Scale each stream to the magnitude of the first, and return the norm of their mean."""
        h, n, m = ops.outputs(h), self.n_embd, self.n_stream
        others = mat_heads(ops.columns(h, n, m * n), w("altup_unembd_proj"), m - 1)
        h = streams.streams_of(self.first(h), others)
        return ops.rms_norm(streams.mean(h, n), w("output_norm"), self.config.eps)
