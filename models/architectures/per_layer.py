"""Additions of Gemma 3n and 4 to gemma3. Every layer has a token embedding, which is multiplied by a gate
computed from the residual. Values have an RMS norm without weights. The last layers share the cache of an
earlier layer of the same kind (windowed or not).
"""

from __future__ import annotations

import math
from dataclasses import replace

from vkbackend.errors import GGUFError
from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures import gemma3
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.memory_specs import KVSpec, LayerCache
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF


class PerLayerInputs(gemma3.Model):
    def __init__(self, gguf: GGUF) -> None:
        super().__init__(gguf)
        arch = gguf.architecture
        n_shared = int(gguf.u32(f"{arch}.attention.shared_kv_layers", 0))
        if n_shared >= self.n_layer:
            raise GGUFError(
                f"{gguf.paths[0]}: {n_shared} of {self.n_layer} layers share a cache, but none owns one"
            )
        self.n_owners = self.n_layer - n_shared
        self.n_embd_layer = int(gguf.u32(f"{arch}.embedding_length_per_layer_input", 0))
        kinds = [layer.rope for layer in self.config.layers]
        if not set(kinds[: self.n_owners]) >= set(kinds):
            raise GGUFError(f"{gguf.paths[0]}: only the first {self.n_owners} layers have k and v")

    # ---- weights ----

    def kv(self, il: int) -> KVSpec:
        spec = super().kv(il)
        assert isinstance(spec, KVSpec)
        if il < self.n_owners:
            return spec
        kind = self.config.layers[il].rope
        return replace(spec, owner=max(i for i in range(self.n_owners) if self.config.layers[i].rope == kind))

    def unread(self) -> set[str]:
        sharing = range(self.n_owners, self.n_layer)
        ends = "k.weight", "v.weight", "k_norm.weight", "k.bias", "v.bias"
        return super().unread() | {f"blk.{il}.attn_{end}" for il in sharing for end in ends}

    def weights(self) -> list[WeightSpec]:
        n, wide = self.n_embd_layer, self.n_embd_layer * self.n_layer
        if not n:
            return super().weights()
        return [
            *super().weights(),
            WeightSpec("per_layer_token_embd.weight", (self.n_vocab, wide), host=True),
            WeightSpec("per_layer_model_proj.weight", (wide, self.n_embd)),
            WeightSpec("per_layer_proj_norm.weight", (n,)),
        ]

    def attention_weights(self, il: int) -> list[WeightSpec]:
        absent = set() if il < self.n_owners else {"attn_k", "attn_v", "attn_k_norm"}
        return [spec for spec in super().attention_weights(il) if spec.name not in absent]

    def embedding_weights(self) -> list[WeightSpec]:
        n_embd, n = self.n_embd, self.n_embd_layer
        per_layer = {"inp_gate": (n, n_embd), "proj": (n_embd, n), "post_norm": (n_embd,)} if n else {}
        return [WeightSpec(*item) for item in per_layer.items()]

    # ---- graph ----

    def per_layer(self, h: Tensor, graph: Graph, w: Weights) -> Tensor:
        """Return the tokens' embeddings for all layers [rows, n_layer * n_embd_layer]. An embedding is (a
        table's row + a projection of `h`) / sqrt(2)."""
        embedded = ops.scale(ops.embed(graph, w("per_layer_token_embd")), math.sqrt(self.n_embd_layer))
        projected = ops.scale(linear(h, w, "per_layer_model_proj"), self.n_embd**-0.5)
        projected = ops.head_norm(projected, w("per_layer_proj_norm"), self.n_embd_layer, self.config.eps)
        return ops.scale(projected + embedded, 0.5**0.5)

    def gated_embedding(self, h: Tensor, per_layer: Tensor, w: Weights, il: int) -> Tensor:
        n = self.n_embd_layer
        x = ops.gelu_mul(linear(h, w, "inp_gate"), ops.columns(per_layer, il * n, (il + 1) * n))
        return ops.rms_norm(linear(x, w, "proj"), w("post_norm"), self.config.eps)

    def store(self, x: Tensor, w: Weights, cache: LayerCache, il: int) -> None:
        k = linear(x, w, "attn_k")
        v = linear(x, w, "attn_v") if w.has("attn_v") else k
        layer = self.config.layers[il]
        ops.kv_store(self.rotate(k, w, "attn_k", il), cache.k, cache.cells, layer.head_dim)
        v = ops.head_norm(v, None, layer.head_dim_v, self.config.eps)
        ops.kv_store(v, cache.v, cache.cells, layer.head_dim_v)
