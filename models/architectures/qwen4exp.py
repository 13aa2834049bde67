"""qwen4exp (Qwen3.8-Flash-Next, its text part): qwen35moe with a residual of several streams (Zhu et al.
2024, arXiv:2409.19606). Layers read a mean of the normed streams, weighted by low-rank gates. An indexer
chooses blocks of positions for attention by the means of their index keys. One layer adds embeddings of
n-grams. Qwen team 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.ops import streams
from vkbackend.meta.ops.chosen_attention import attend_chosen, choose, pool_keys
from vkbackend.meta.ops.heads import concat
from vkbackend.meta.plan import Role
from vkbackend.meta.policy import DeltaNet, Layer
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures import memory_specs as memory
from vkbackend.models.architectures import qwen3next
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.ngrams import Ngrams
from vkbackend.models.architectures.reading import read_count, read_counts
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.indexer import MAX_INDEX_HEAD
from vkbackend.ops.moe import UNNORMED

ONES = "router_ones"


class Model(qwen3next.Model):
    tiled = True
    interleaved_sections = True
    residual_is_wide = True
    predicts_ahead = False
    pre_norms = False

    def __init__(self, gguf: GGUF) -> None:
        super().__init__(gguf)
        self.n_stream = read_count(gguf, "hyper_connection.count", limit=16)
        self.rank = read_count(gguf, "hyper_connection.low_rank")
        keys = "head_count", "key_length", "top_k"
        self.n_index, self.index_dim, top_k = (read_count(gguf, f"attention.indexer.{key}") for key in keys)
        ratios = read_counts(gguf, "attention.compress_ratios", self.n_layer, low=0)
        of_attention = {n for n, recurrent in zip(ratios, self.recurrent, strict=True) if not recurrent}
        if len(of_attention) != 1 or not (ratio := max(of_attention)) or top_k % ratio:
            raise GGUFError(
                f"{gguf.paths[0]}: blocks of {sorted(of_attention)} positions do not divide {top_k}"
            )
        self.block_size, self.n_chosen = ratio, top_k // ratio + 1
        if self.index_dim % 8 or self.index_dim > MAX_INDEX_HEAD:
            raise UnsupportedModel(
                f"index keys of {self.index_dim}: multiples of 8 up to {MAX_INDEX_HEAD} are supported"
            )
        self.rope_tables["rope_start"] = replace(self.rope_tables["rope"], shift=ratio - 1)
        layers = [int(il) for il in gguf.ints("qwen4exp.ple.layers", [])]
        if len(layers) > 1 or any(il >= self.n_layer or not self.recurrent[il] for il in layers):
            raise UnsupportedModel(
                f"embeddings of n-grams in layers {layers}: one recurrent layer is supported"
            )
        c = self.config
        sizes = c.n_embd, c.n_vocab, self.n_stream, c.eps
        self.ngrams = Ngrams(gguf, layers[0], *sizes) if layers else None

    def unread(self) -> set[str]:
        return super().unread() | ({self.ngrams.unread} if self.ngrams else set())

    def has_ngrams(self, il: int) -> bool:
        return self.ngrams is not None and self.ngrams.il == il

    # ---- weights ----

    def outer_weights(self) -> list[WeightSpec]:
        specs = [spec for spec in super().outer_weights() if spec.name != "output_norm.weight"]
        specs += self.stream_weights("output_hc", last=True)
        return [*specs, *(self.ngrams.outer_weights() if self.ngrams else [])]

    def stream_weights(self, name: str, last: bool = False) -> list[WeightSpec]:
        n, m = self.n_stream * self.config.n_embd, self.n_stream
        gain, zeros = np.full(2, 1 / m, np.float32), np.zeros(2 * m, np.float32)
        specs = [
            WeightSpec(f"{name}_norm.weight", (n,), groups=m),
            WeightSpec(f"{name}_down.weight", (self.rank, n)),
            WeightSpec(f"{name}_up.weight", (n, self.rank)),
        ]
        if last:
            return specs
        return [
            *specs,
            WeightSpec(f"{name}_inject.weight", (m, n)),
            WeightSpec(f"{name}_scale.weight", gain.shape, values=gain),
            WeightSpec(f"{name}_base.weight", zeros.shape, values=zeros),
        ]

    def attention_weights(self, il: int) -> list[WeightSpec]:
        specs = [spec for spec in super().attention_weights(il) if spec.name != "attn_norm"]
        specs += self.stream_weights("hc_attn")
        n_embd, n, copied = self.config.n_embd, self.index_dim, Role("index")
        if not self.recurrent[il]:
            return [
                *specs,
                WeightSpec("indexer.q_proj.weight", (self.n_index * n, n_embd), copied),
                WeightSpec("indexer.k_proj.weight", (n, n_embd), copied),
                WeightSpec("indexer.q_norm.weight", (n,)),
                WeightSpec("indexer.k_norm.weight", (n,)),
            ]
        return [*specs, *(self.ngrams.layer_weights() if self.ngrams and self.has_ngrams(il) else [])]

    def feed_forward_weights(self, il: int) -> list[WeightSpec]:
        ones = np.ones(self.config.n_embd, np.float32)
        specs = [*super().feed_forward_weights(il), *self.stream_weights("hc_ffn")]
        return [*specs, WeightSpec(ONES, ones.shape, values=ones)]

    def kv(self, il: int) -> memory.MemorySpec:
        spec = super().kv(il)
        if isinstance(spec, memory.KVSpec):
            return replace(spec, index_dim=self.index_dim, raw_dim=self.index_dim, block=self.block_size)
        if self.ngrams and self.has_ngrams(il) and isinstance(spec, memory.StateSpec):
            return replace(spec, extra=self.ngrams.state())
        return spec

    def layer(self, il: int, types: Mapping[str, str]) -> Layer:
        layer = super().layer(il, types)
        if not self.has_ngrams(il):
            return layer
        assert isinstance(layer.attention, DeltaNet)
        return replace(layer, attention=replace(layer.attention, shifts=True), kind="ngrams")

    # ---- graph ----

    def embed(self, graph: Graph, w: Weights) -> Tensor:
        return streams.copies(super().embed(graph, w), self.n_stream)

    def residual(self, graph: Graph, w: Weights, caches: list[memory.LayerMemory]) -> Tensor:
        if self.ngrams:
            self.ngrams.begin(graph, w)
        return super().residual(graph, w, caches)

    def normed(self, h: Tensor, w: Weights, name: str) -> Tensor:
        return ops.mul_vector(ops.head_norm(h, None, self.config.n_embd, self.config.eps), w(name))

    def mixed(self, x: Tensor, w: Weights, name: str) -> Tensor:
        """Return the mean of the normed streams x, weighted by low-rank gates."""
        low = ops.silu(ops.scale(linear(x, w, f"{name}_down"), 1 / self.n_stream))
        return streams.mean(ops.sigmoid_mul(linear(low, w, f"{name}_up"), x), self.config.n_embd)

    def block(self, h: Tensor, w: Weights, cache: memory.LayerMemory, il: int) -> Tensor:
        m = self.n_stream
        if self.ngrams and self.has_ngrams(il):
            assert isinstance(cache, memory.LayerState)
            h = h + self.ngrams.forward(h, w, cache)
        for name in ("hc_attn", "hc_ffn"):
            normed = self.normed(h, w, f"{name}_norm")
            x, z = self.mixed(normed, w, name), linear(normed, w, f"{name}_inject")
            y = self.mix(x, w, cache, il) if name == "hc_attn" else self.ffn(x, w, il)
            by = concat(z, z, m, m), w(f"{name}_scale"), w(f"{name}_base")
            h = streams.spread(h, y, *by, 2.0, 0.0)
        return h

    def ffn(self, h: Tensor, w: Weights, il: int) -> Tensor:
        mixture, x = self.config.layers[il].mixture, ops.same_bits(h)
        assert mixture
        return mixture.forward(x, x, w(ONES), w, UNNORMED)

    def gate_delta(self, gate: Tensor, o: Tensor) -> Tensor:
        return ops.sigmoid_mul(gate, o)

    def steered(self, h: Tensor, w: Weights, il: int) -> Tensor:
        return streams.add_to_all(h, w("control_vector")) if il in self.control else h

    def hidden_outputs(self, h: Tensor, w: Weights) -> Tensor:
        return self.mixed(self.normed(ops.outputs(h), w, "output_hc_norm"), w, "output_hc")

    def store(self, x: Tensor, w: Weights, cache: memory.LayerCache, il: int) -> None:
        super().store(x, w, cache, il)
        assert cache.index and cache.raw
        n, k = self.index_dim, linear(x, w, "indexer.k_proj")
        ops.kv_store(k, cache.raw, cache.cells, n)
        pooled = pool_keys(k, cache.raw, cache.cells, self.block_size)
        pooled = ops.head_norm(pooled, w("indexer.k_norm"), n, self.config.eps)
        pooled = ops.rope(pooled, n, "rope_start", half_split=self.half_split)
        ops.kv_store(pooled, cache.index, cache.cells, n, block=self.block_size)

    def attend(self, q: Tensor, x: Tensor, w: Weights, cache: memory.LayerCache, il: int) -> Tensor:
        assert cache.index
        layer, n, block = self.config.layers[il], self.index_dim, self.block_size
        index = ops.head_norm(linear(x, w, "indexer.q_proj"), w("indexer.q_norm"), n, self.config.eps)
        index = ops.rope(index, n, half_split=self.half_split)
        how: dict[str, Any] = {"block": block, "tail": True}
        chosen = choose(index, None, cache.index, cache.cells, heads=self.n_index, top_k=self.n_chosen, **how)
        how |= {"heads": layer.n_head, "kv_heads": layer.n_head_kv, "scale": layer.scale}
        how |= {"head_dim_k": layer.head_dim, "head_dim_v": layer.head_dim_v}
        a = attend_chosen(q, cache.k, cache.v, cache.cells, chosen, **how)
        return linear(self.gate(a, x, w), w, "attn_output")
