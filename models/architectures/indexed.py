"""Latent attention to positions that an indexer chooses (DeepSeek-AI 2025, arXiv:2512.02556). The indexer
computes a q per head, and one key per position.

A position's score is the sum over heads of weight * max(q . k, 0). A row attends to the `top_k` positions
with the highest scores. Index keys have a LayerNorm with bias, and RoPE rotates the first dimensions of index
keys and q. The paper's Hadamard matrix (for 8-bit keys) and constant factor are omitted, because neither
changes the order of scores. A layer without an indexer uses the positions that an earlier layer chose
(arXiv:2603.12201).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.meta import ops
from vkbackend.meta.ops.chosen_attention import choose
from vkbackend.meta.plan import rows
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures import deepseek2
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.memory_specs import KVSpec, LayerCache, MemorySpec
from vkbackend.models.architectures.reading import read_count, read_flags
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.indexer import MAX_INDEX_HEAD


def indexer_weights(n_embd: int, rank_q: int, n_heads: int, head: int) -> list[WeightSpec]:
    """Return the weights of an indexer with `n_heads` heads of size `head`."""
    whole = rows("kv_heads")
    return [
        WeightSpec("indexer.attn_q_b.weight", (n_heads * head, rank_q), whole),
        WeightSpec("indexer.attn_k.weight", (head, n_embd), whole),
        WeightSpec("indexer.k_norm.weight", (head,)),
        WeightSpec("indexer.k_norm.bias", (head,)),
        WeightSpec("indexer.proj.weight", (n_heads, n_embd), whole),
    ]


def layers_with_indexer(gguf: GGUF, n_layer: int) -> Sequence[bool]:
    """Return whether each layer has an indexer. Without the key in the file, the layer's tensors decide."""
    flags = read_flags(gguf, "attention.indexer.types", n_layer)
    return flags or [f"blk.{il}.indexer.attn_k.weight" in gguf.tensors for il in range(n_layer)]


class IndexedAttention(deepseek2.Model):
    """Attention's RoPE pairs neighbours. The indexer's RoPE is half-split if `index_half_split`."""

    index_half_split = False
    index_eps = 1e-6  # the epsilon of the index keys' LayerNorm, which files do not state

    def read_config(self, gguf: GGUF) -> Config:
        config = super().read_config(gguf)
        if self.full or not self.rank_q:
            raise GGUFError(
                f"{gguf.paths[0]}: an indexer needs a q from a latent (attention.q_lora_rank), and one "
                "latent head for keys and values (attention.key_length_mla)"
            )
        self.n_index, self.index_dim, self.top_k = (
            read_count(gguf, f"attention.indexer.{key}") for key in ("head_count", "key_length", "top_k")
        )
        if self.index_dim % 8 or not self.shared <= self.index_dim <= MAX_INDEX_HEAD:
            raise UnsupportedModel(
                f"index keys of {self.index_dim}: multiples of 8 from {self.shared} (RoPE dimensions) to "
                f"{MAX_INDEX_HEAD} are supported"
            )
        n_target = len(config.layers) - self.n_ahead
        indexed = [*self.read_indexed(gguf, n_target), *[True] * self.n_ahead]
        if not indexed[0]:
            raise GGUFError(f"{gguf.paths[0]}: layer 0 has no indexer")
        # Layer il uses the positions that layer choosers[il] chose.
        self.choosers = [max(i for i in range(il + 1) if indexed[i]) for il in range(len(indexed))]
        return config

    def read_indexed(self, gguf: GGUF, n_layer: int) -> Sequence[bool]:
        return [True] * n_layer

    def attention_weights(self, il: int) -> list[WeightSpec]:
        specs = super().attention_weights(il)
        if self.choosers[il] != il:
            return specs
        return [*specs, *indexer_weights(self.config.n_embd, self.rank_q, self.n_index, self.index_dim)]

    def kv(self, il: int) -> MemorySpec:
        spec, chooser = super().kv(il), self.choosers[il]
        assert isinstance(spec, KVSpec)
        return replace(spec, index_dim=self.index_dim) if chooser == il else replace(spec, chooser=chooser)

    def choose(self, h: Tensor, q: Tensor, w: Weights, cache: LayerCache, il: int) -> Tensor:
        kept = h.graph.kept
        if cache.index is None:
            return kept["chosen"]
        self.store_index(h, w, cache)
        turned, gains = self.index_queries(q, w), linear(h, w, "indexer.proj")
        kept["chosen"] = choose(turned, gains, cache.index, cache.cells, heads=self.n_index, top_k=self.top_k)
        return kept["chosen"]

    def index_queries(self, q: Tensor, w: Weights) -> Tensor:
        return self.turned(linear(q, w, "indexer.attn_q_b"))

    def store(self, x: Tensor, w: Weights, cache: LayerCache, il: int) -> None:
        super().store(x, w, cache, il)
        self.store_index(x, w, cache)

    def store_index(self, h: Tensor, w: Weights, cache: LayerCache) -> None:
        assert cache.index
        norm, bias = w("indexer.k_norm"), w.bias("indexer.k_norm")
        k = ops.layer_norm(linear(h, w, "indexer.attn_k"), norm, bias, self.index_eps)
        ops.kv_store(self.turned(k), cache.index, cache.cells, self.index_dim)

    def turned(self, x: Tensor) -> Tensor:
        return ops.rope(x, self.index_dim, half_split=self.index_half_split)
