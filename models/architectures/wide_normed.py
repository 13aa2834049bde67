"""Decoders with RMS norms of q and k over all heads, before RoPE."""

from __future__ import annotations

from vkbackend.meta import ops
from vkbackend.meta.ops.wide import wide_norms
from vkbackend.meta.plan import rows
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.memory_specs import LayerCache
from vkbackend.models.architectures.weight_specs import WeightSpec


class WideNormed(Decoder):
    def attention_weights(self, il: int) -> list[WeightSpec]:
        layer = self.config.layers[il]
        return [
            *super().attention_weights(il),
            WeightSpec("attn_q_norm", (layer.n_head * layer.head_dim,), rows("heads")),
            WeightSpec("attn_k_norm", (layer.n_head_kv * layer.head_dim,), rows("kv_heads")),
        ]

    def attention(self, x: Tensor, w: Weights, cache: LayerCache, il: int) -> Tensor:
        parts = [(linear(x, w, name), w(f"{name}_norm")) for name in ("attn_q", "attn_k")]
        q, k = (self.turned(part, il) for part in wide_norms(parts, self.config.eps))
        layer = self.config.layers[il]
        ops.kv_store(k, cache.k, cache.cells, layer.head_dim)
        ops.kv_store(linear(x, w, "attn_v"), cache.v, cache.cells, layer.head_dim_v)
        return self.attend(q, x, w, cache, il)

    def turned(self, x: Tensor, il: int) -> Tensor:
        layer = self.config.layers[il]
        return ops.rope(x, layer.head_dim, layer.rope, half_split=self.half_split)
