"""hy_v4 (Hunyuan 4): glm-dsa with hyper-connections (Zhu et al. 2024, arXiv:2409.19606). The residual has
several streams. Attention and FFN read a weighted sum of the streams, and their result is added to each
stream with a weight. The weights are sigmoids of a projection of all streams. Attention has a sink per
head and an output gate. RoPE rotates the last dimensions of index keys. Tencent 2026.
"""

from __future__ import annotations

from collections.abc import Sequence

from vkbackend.errors import UnsupportedModel
from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.ops import streams
from vkbackend.meta.ops.heads import concat
from vkbackend.meta.plan import rows
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.config import Config, with_limits
from vkbackend.models.architectures.indexed import IndexedAttention, layers_with_indexer
from vkbackend.models.architectures.memory_specs import LayerMemory
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import read_count, read_float
from vkbackend.models.architectures.weight_specs import WeightSpec, fused
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import Gating
from vkbackend.ops.streams import MAX_STREAMS


class Model(IndexedAttention):
    mixture = Mixture(gating=Gating("sigmoid"), limits_gate=True)
    residual_is_wide = True
    predicts_ahead = False

    def read_config(self, gguf: GGUF) -> Config:
        self.n_stream = read_count(gguf, "hyper_connection.count")
        if self.n_stream > MAX_STREAMS:
            raise UnsupportedModel(f"{self.n_stream} streams: up to {MAX_STREAMS} are supported")
        self.stream_eps = read_float(gguf, "hyper_connection.epsilon", 0.0)
        self.gain = read_float(gguf, "hyper_connection.magnitude", 1.0)
        c = with_limits(super().read_config(gguf), gguf)
        self.index_eps = c.eps
        return c

    def read_indexed(self, gguf: GGUF, n_layer: int) -> Sequence[bool]:
        return layers_with_indexer(gguf, n_layer)

    # ---- weights ----

    def outer_weights(self) -> list[WeightSpec]:
        return [*super().outer_weights(), *self.stream_weights("output_hc", 1)]

    def stream_weights(self, name: str, parts: int) -> list[WeightSpec]:
        n = parts * self.n_stream
        return [
            WeightSpec(f"{name}_fn.weight", (n, self.n_stream * self.config.n_embd)),
            WeightSpec(f"{name}_base.weight", (n,)),
            WeightSpec(f"{name}_scale.weight", (parts,)),
        ]

    def attention_weights(self, il: int) -> list[WeightSpec]:
        n_head, n_embd = self.config.layers[il].n_head, self.config.n_embd
        specs = [
            *super().attention_weights(il),
            *self.stream_weights("hc_attn", 2),
            WeightSpec("attn_sinks", (n_head,), rows("heads")),
            WeightSpec("attn_gate", (n_head * self.size_v, n_embd), rows("heads")),
        ]
        whole = rows("kv_heads")
        parts = [
            WeightSpec("indexer.q_still.weight", (self.n_index * self.index_still, self.rank_q), whole),
            WeightSpec("indexer.q_turned.weight", (self.n_index * self.shared, self.rank_q), whole),
        ]
        rest = [spec for spec in specs if spec.name != "indexer.attn_q_b.weight"]
        if len(rest) == len(specs):
            return specs
        return [*rest, *fused(f"blk.{il}.indexer.attn_q_b.weight", parts, self.n_index)]

    def feed_forward_weights(self, il: int) -> list[WeightSpec]:
        return [*super().feed_forward_weights(il), *self.stream_weights("hc_ffn", 2)]

    @property
    def index_still(self) -> int:
        """Return how many dimensions of an index key have no RoPE."""
        return self.index_dim - self.shared

    # ---- graph ----

    def embed(self, graph: Graph, w: Weights) -> Tensor:
        return streams.copies(super().embed(graph, w), self.n_stream)

    def mixes(self, h: Tensor, w: Weights, name: str) -> Tensor:
        return linear(ops.head_norm(h, None, h.width, self.config.eps), w, f"{name}_fn")

    def mixed(self, h: Tensor, mixes: Tensor, w: Weights, name: str) -> Tensor:
        return streams.mix(h, mixes, w(f"{name}_scale"), w(f"{name}_base"), self.n_stream, self.stream_eps)

    def block(self, h: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        for name in ("hc_attn", "hc_ffn"):
            mixes = self.mixes(h, w, name)
            x = self.mixed(h, mixes, w, name)
            if name == "hc_attn":
                y = self.mix(self.attention_input(x, w, il), w, cache, il)
            else:
                y = self.ffn(ops.same_bits(x) if self.config.layers[il].mixture else x, w, il)
            scale, base = w(f"{name}_scale"), w(f"{name}_base")
            h = streams.spread(h, y, mixes, scale, base, self.gain, self.stream_eps)
        return h

    def steered(self, h: Tensor, w: Weights, il: int) -> Tensor:
        return streams.add_to_all(h, w("control_vector")) if il in self.control else h

    def hidden_outputs(self, h: Tensor, w: Weights) -> Tensor:
        h = ops.outputs(h)
        return self.output_norm(self.mixed(h, self.mixes(h, w, "output_hc"), w, "output_hc"), w)

    def gate(self, a: Tensor, x: Tensor, w: Weights) -> Tensor:
        return ops.sigmoid_mul(linear(x, w, "attn_gate"), a)

    def index_queries(self, q: Tensor, w: Weights) -> Tensor:
        turned = ops.rope(linear(q, w, "indexer.q_turned"), self.shared, half_split=self.index_half_split)
        return concat(linear(q, w, "indexer.q_still"), turned, self.index_still, self.shared)

    def turned(self, x: Tensor) -> Tensor:
        n = self.index_still
        last = ops.rope(ops.columns(x, n, x.width), self.shared, half_split=self.index_half_split)
        return concat(ops.columns(x, 0, n), last, n, self.shared)
