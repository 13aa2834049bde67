"""A residual of several streams, which a matrix mixes after attention and after the FFN. The rows and columns
of the matrix sum to 1 (Xie et al. 2025, arXiv:2512.24880)."""

from __future__ import annotations

from dataclasses import replace

from vkbackend.errors import UnsupportedModel
from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.ops import streams
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.config import Config, with_limits
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.memory_specs import LayerMemory
from vkbackend.models.architectures.reading import read_count, read_float, read_floats
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.streams import MAX_STREAMS


class HyperConnected(Decoder):
    residual_is_wide = True

    def read_config(self, gguf: GGUF) -> Config:
        self.n_stream = read_count(gguf, "hyper_connection.count")
        self.n_turns = read_count(gguf, "hyper_connection.sinkhorn_iterations", limit=1000)
        self.stream_eps = read_float(gguf, "hyper_connection.epsilon", 0.0, low=0.0)
        if self.n_stream > MAX_STREAMS:
            raise UnsupportedModel(f"{self.n_stream} streams: up to {MAX_STREAMS} are supported")
        return self.with_bounds(super().read_config(gguf), gguf)

    def with_bounds(self, c: Config, gguf: GGUF) -> Config:
        """Set the bounds of activations. The bounds of routed experts are the default for all other FFNs."""
        kind = "shexp" if f"{gguf.architecture}.swiglu_clamp_shexp" in gguf.metadata else "exp"
        self.limits = read_floats(gguf, f"swiglu_clamp_{kind}", len(c.layers), low=0.0)
        c = with_limits(c, gguf)
        layers = [
            replace(layer, mixture=layer.mixture and replace(layer.mixture, limit_shared=limit))
            for layer, limit in zip(c.layers, self.limits, strict=True)
        ]
        return replace(c, layers=tuple(layers))

    # ---- weights ----

    def stream_weights(self, name: str) -> list[WeightSpec]:
        n = (2 + self.n_stream) * self.n_stream
        return [
            WeightSpec(f"{name}_fn", (n, self.n_stream * self.config.n_embd)),
            WeightSpec(f"{name}_base", (n,)),
            WeightSpec(f"{name}_scale", (3,)),
        ]

    def attention_weights(self, il: int) -> list[WeightSpec]:
        return [*super().attention_weights(il), *self.stream_weights("hc_attn")]

    def feed_forward_weights(self, il: int) -> list[WeightSpec]:
        return [*super().feed_forward_weights(il), *self.stream_weights("hc_ffn")]

    # ---- graph ----

    def embed(self, graph: Graph, w: Weights) -> Tensor:
        return streams.copies(super().embed(graph, w), self.n_stream)

    def mixes(self, h: Tensor, w: Weights, name: str) -> Tensor:
        return linear(ops.head_norm(h, None, h.width, self.config.eps), w, f"{name}_fn")

    def block(self, h: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        for name in ("hc_attn", "hc_ffn"):
            by = self.mixes(h, w, name), w(f"{name}_scale"), w(f"{name}_base")
            x = streams.mix(h, *by, self.n_stream, self.stream_eps)
            if name == "hc_attn":
                y = self.mix(self.attention_input(x, w, il), w, cache, il)
            else:
                y = self.ffn(ops.same_bits(x) if self.config.layers[il].mixture else x, w, il)
            h = streams.transport(h, y, *by, self.n_turns, self.stream_eps)
        return h

    def steered(self, h: Tensor, w: Weights, il: int) -> Tensor:
        return streams.add_to_all(h, w("control_vector")) if il in self.control else h
