"""glm5-next (GLM-5.3-Flash, its text part): kimi-linear with a residual of several streams, which a matrix
mixes after attention and after the FFN. The rows and columns of the matrix sum to 1 (Xie et al. 2025,
arXiv:2512.24880). Latent attention has no RoPE and reads blocks of positions. An indexer chooses blocks by
the weighted mean of their index keys. The incomplete block that contains the row is always read. Activations
are bounded. Z.ai 2026.
"""

from __future__ import annotations

from dataclasses import replace

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.meta import ops
from vkbackend.meta.ops import streams
from vkbackend.meta.ops.chosen_attention import choose, pool_keys
from vkbackend.meta.ops.heads import concat
from vkbackend.meta.plan import rows
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures import kimi_linear
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.block_places import place_weight, read_biases
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.hyper_connected import HyperConnected
from vkbackend.models.architectures.indexed import indexer_weights
from vkbackend.models.architectures.memory_specs import KVSpec, LayerCache, MemorySpec
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import (
    check_off,
    read_count,
    read_flags,
    read_float,
)
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.indexer import MAX_INDEX_HEAD
from vkbackend.ops.moe import Gating


class Model(HyperConnected, kimi_linear.Model):
    mixture = Mixture(gating=Gating("sigmoid"), limits_gate=True)
    tail = True

    def read_config(self, gguf: GGUF) -> Config:
        self.bound = read_float(gguf, "kda.gate_lower_bound", 0.0)
        c = super().read_config(gguf)
        self.read_indexer(gguf, c)
        self.biases = read_biases(gguf)
        return c

    def unread(self) -> set[str]:
        return {*super().unread(), *self.biases}

    def read_indexer(self, gguf: GGUF, c: Config) -> None:
        check_off(gguf, "attention.indexer.kpool_select_tail", True)
        keys = "head_count", "key_length", "top_k", "kpool"
        self.n_index, self.index_dim, self.top_k, self.block_size = (
            read_count(gguf, f"attention.indexer.{key}") for key in keys
        )
        if self.index_dim % 8 or self.index_dim > MAX_INDEX_HEAD or not self.rank_q or self.full:
            raise UnsupportedModel(
                f"index keys of {self.index_dim}: multiples of 8 up to {MAX_INDEX_HEAD}, a q from a latent, "
                "and one latent head for keys and values are supported"
            )
        if self.top_k % self.block_size:
            raise GGUFError(
                f"{gguf.paths[0]}: top_k {self.top_k} is not a multiple of kpool {self.block_size}"
            )
        self.index_eps = read_float(gguf, "attention.layer_norm_epsilon", 1e-6, low=0.0)
        flags = read_flags(gguf, "attention.indexer.types", len(c.layers)) or [True] * len(c.layers)
        # Layer il reads the blocks that layer choosers[il] chose.
        self.choosers: dict[int, int] = {}
        last = None
        for il in (i for i, recurrent in enumerate(self.recurrent) if not recurrent):
            last = il if flags[il] else last
            if last is None:
                raise GGUFError(f"{gguf.paths[0]}: layer {il} has no indexer")
            self.choosers[il] = last

    # ---- weights ----

    def attention_weights(self, il: int) -> list[WeightSpec]:
        specs = super().attention_weights(il)
        if self.choosers.get(il) != il:
            return specs
        n_embd, n, whole = self.config.n_embd, self.index_dim, rows("kv_heads")
        return [
            *specs,
            *indexer_weights(n_embd, self.rank_q, self.n_index, n),
            WeightSpec("indexer_compressor_gate", (n, n_embd), whole),
            place_weight(self.biases, "indexer_compressor", il, (self.block_size, n)),
        ]

    def kv(self, il: int) -> MemorySpec:
        spec = super().kv(il)
        if not isinstance(spec, KVSpec):
            return spec
        if (chooser := self.choosers[il]) != il:
            return replace(spec, chooser=chooser)
        n = self.index_dim
        return replace(spec, index_dim=n, raw_dim=2 * n, block=self.block_size)

    # ---- graph ----

    def hidden_outputs(self, h: Tensor, w: Weights) -> Tensor:
        return self.output_norm(streams.mean(ops.outputs(h), self.config.n_embd), w)

    def feed_forward(self, x: Tensor, w: Weights, il: int) -> Tensor:
        if not self.limits[il]:
            return super().feed_forward(x, w, il)
        a = ops.silu_of_clamped(linear(x, w, "ffn_gate"), linear(x, w, "ffn_up"), self.limits[il])
        return linear(a, w, "ffn_down")

    def choose(self, h: Tensor, q: Tensor, w: Weights, cache: LayerCache, il: int) -> Tensor:
        kept = h.graph.kept
        if cache.index is None:
            return kept["chosen"]
        self.store_index(h, w, cache)
        kept["chosen"] = choose(
            linear(q, w, "indexer.attn_q_b"),
            linear(h, w, "indexer.proj"),
            cache.index,
            cache.cells,
            heads=self.n_index,
            top_k=self.top_k // self.block_size + 1,
            block=self.block_size,
            tail=True,
        )
        return kept["chosen"]

    def store_index(self, h: Tensor, w: Weights, cache: LayerCache) -> None:
        assert cache.index and cache.raw
        n, norm, bias = self.index_dim, w("indexer.k_norm"), w.bias("indexer.k_norm")
        k = ops.layer_norm(linear(h, w, "indexer.attn_k"), norm, bias, self.index_eps)
        gate = linear(h, w, "indexer_compressor_gate")
        ops.kv_store(concat(k, gate, n, n), cache.raw, cache.cells, 2 * n)
        pooled = pool_keys(k, cache.raw, cache.cells, self.block_size, w("indexer_compressor_places"))
        ops.kv_store(pooled, cache.index, cache.cells, n, block=self.block_size)
