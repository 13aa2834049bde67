"""Attention to a window and to entries, one per block of positions (DeepSeek-AI 2026, DeepSeek V4).

One vector per position is both key and value of all heads. RoPE rotates the end of each head, and attention's
result is rotated back. Each group of heads has an output matrix of low rank. An entry is a weighted mean over
its block. Layers with an indexer have short blocks, whose means overlap, and read the entries that the
indexer chooses. Other layers read all entries. Vectors and the inputs of means are kept for the window alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import gcd

import numpy as np

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.formats import block_of
from vkbackend.meta import ops
from vkbackend.meta.ops.chosen_attention import choose, pool_keys
from vkbackend.meta.ops.entry_attention import attend_entries
from vkbackend.meta.ops.heads import concat, mat_heads
from vkbackend.meta.plan import columns, rows
from vkbackend.meta.policy import Attention
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.block_places import place_weight, read_biases
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.hyper_connected import HyperConnected
from vkbackend.models.architectures.memory_specs import KeyRotation, KVSpec, LayerCache, MemorySpec
from vkbackend.models.architectures.reading import read_count, read_counts, read_rope
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.indexer import MAX_INDEX_HEAD
from vkbackend.rope import RopeTable


class CompressedAttention(HyperConnected):
    windows = True

    def read_config(self, gguf: GGUF) -> Config:
        c, path = super().read_config(gguf), gguf.paths[0]
        n_layer, arch = len(c.layers), gguf.architecture
        self.rank_q = read_count(gguf, "attention.q_lora_rank")
        self.n_group = read_count(gguf, "attention.output_group_count")
        self.rank_o = read_count(gguf, "attention.output_lora_rank")
        self.window = read_count(gguf, "attention.sliding_window")
        self.ratios = read_counts(gguf, "attention.compress_ratios", n_layer, low=0)
        self.biases = read_biases(gguf)
        # An indexer's blocks overlap.
        self.indexed = [f"blk.{il}.indexer.proj.weight" in gguf.tensors for il in range(n_layer)]
        keys = "head_count", "key_length", "top_k"
        self.n_index, self.index_dim, self.top_k = (
            read_count(gguf, f"attention.indexer.{key}") if any(self.indexed) else 8 for key in keys
        )
        shapes = {(la.n_head, la.n_head_kv, la.head_dim, la.head_dim_v, la.n_rot) for la in c.layers}
        n_head, n_kv, size, size_v, n_rot = shapes.pop()
        if shapes or n_kv != 1 or size != size_v or size % 32:
            raise UnsupportedModel(
                f"{n_kv} kv heads of {size} and {size_v}: one of a multiple of "
                "32, which is both key and value, is supported"
            )
        if n_head % self.n_group or self.n_group * self.rank_o % n_head:
            raise UnsupportedModel(f"{self.n_group} output groups of rank {self.rank_o} for {n_head} heads")
        if any(self.indexed) and (self.index_dim % 8 or not n_rot <= self.index_dim <= MAX_INDEX_HEAD):
            raise UnsupportedModel(
                f"index keys of {self.index_dim}: multiples of 8 from {n_rot} (RoPE dimensions) to "
                f"{MAX_INDEX_HEAD} are supported"
            )
        for il, ratio in enumerate(self.ratios):
            if self.indexed[il] and not ratio:
                raise GGUFError(f"{path}: layer {il} has an indexer, but no {arch}.attention.compress_ratios")
        layers = [
            replace(la, rope="rope_of_entries") if ratio else replace(la, window=self.window)
            for la, ratio in zip(c.layers, self.ratios, strict=True)
        ]
        return replace(c, layers=tuple(layers))

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        layer, n_ctx = self.config.layers[0], self.config.n_ctx_train
        size, n_rot = layer.head_dim, layer.n_rot
        stated = read_rope(gguf, n_rot, n_ctx)
        plain = RopeTable(size, stated.freq_base, skipped=size - n_rot)
        base = float(gguf.f32(f"{gguf.architecture}.attention.compress_rope_freq_base"))
        # YaRN does not scale cos and sin here.
        scale = stated.attn_factor / stated.magnitude
        scaled = replace(stated, n_rot=size, skipped=size - n_rot, freq_base=base, attn_factor=scale)
        n_index = self.index_dim if any(self.indexed) else n_rot
        tables = {
            "rope": plain,
            "rope_of_entries": scaled,
            "rope_of_index": replace(scaled, n_rot=n_index, skipped=n_index - n_rot),
        }
        minus = -np.ones(n_rot // 2)
        tables |= {f"{name}_back": replace(table, freq_factors=minus) for name, table in tables.items()}
        for name in ("rope_of_entries", "rope_of_index"):
            for ratio in {ratio for ratio in self.ratios if ratio}:
                tables[f"{name}_{ratio}"] = replace(tables[name], shift=ratio - 1)
        return tables

    # ---- weights ----

    def attention_weights(self, il: int) -> list[WeightSpec]:
        n_embd, layer, whole = self.config.n_embd, self.config.layers[il], rows("kv_heads")
        n_head, size, rank = layer.n_head, layer.head_dim, self.n_group * self.rank_o
        specs = [
            WeightSpec("attn_norm", (n_embd,)),
            WeightSpec("attn_q_a", (self.rank_q, n_embd)),
            WeightSpec("attn_q_a_norm", (self.rank_q,)),
            WeightSpec("attn_q_b", (n_head * size, self.rank_q), rows("heads")),
            WeightSpec("attn_kv", (size, n_embd), whole),
            WeightSpec("attn_kv_a_norm", (size,)),
            WeightSpec("attn_sinks", (n_head,), rows("heads")),
            WeightSpec(
                "attn_output_a", (rank, n_head // self.n_group * size), rows("heads"), groups=self.n_group
            ),
            WeightSpec("attn_output_b", (n_embd, rank), columns("heads")),
            *self.stream_weights("hc_attn"),
        ]
        if self.ratios[il]:
            specs += self.pool_weights("attn_compressor", size, il)
        if not self.indexed[il]:
            return specs
        n = self.index_dim
        return [
            *specs,
            *self.pool_weights("indexer_compressor", n, il),
            WeightSpec("indexer.attn_q_b.weight", (self.n_index * n, self.rank_q), whole),
            WeightSpec("indexer.proj.weight", (self.n_index, n_embd), whole),
        ]

    def pool_weights(self, name: str, n: int, il: int) -> list[WeightSpec]:
        wide = n * (1 + self.indexed[il])
        return [
            WeightSpec(f"{name}_kv", (wide, self.config.n_embd), rows("kv_heads")),
            WeightSpec(f"{name}_gate", (wide, self.config.n_embd), rows("kv_heads")),
            place_weight(self.biases, name, il, (self.ratios[il], wide)),
            WeightSpec(f"{name}_norm", (n,)),
        ]

    def unread(self) -> set[str]:
        return {*super().unread(), *self.biases}

    def kv(self, il: int) -> MemorySpec:
        size, series = self.config.layers[il].head_dim, 1 + self.indexed[il]
        if not self.ratios[il]:
            return KVSpec(1, size, 0, window=self.window)
        n, ratio = self.index_dim if self.indexed[il] else 0, self.ratios[il]
        raw, seen = 2 * series * (size + n), max(self.window, series * ratio)
        return KVSpec(1, size, 0, window=seen, index_dim=n, raw_dim=raw, block=ratio, entries=True)

    def attention_of(self, il: int, types: Mapping[str, str]) -> Attention:
        layer, block = self.config.layers[il], block_of(types[f"blk.{il}.attn_output_b.weight"])[0]
        groups = block // gcd(block, self.rank_o)  # keeps the blocks of attn_output_b whole
        heads = layer.n_head // self.n_group * groups
        return Attention(layer.n_head, 1, layer.head_dim, layer.head_dim, heads * layer.head_dim)

    def key_rotation(self, il: int) -> KeyRotation | None:
        raise UnsupportedModel("entries cover blocks of positions, which cannot move")

    # ---- graph ----

    def attention(self, x: Tensor, w: Weights, cache: LayerCache, il: int) -> Tensor:
        layer, eps = self.config.layers[il], self.config.eps
        size, ratio = layer.head_dim, self.ratios[il]
        q_in = ops.rms_norm(linear(x, w, "attn_q_a"), w("attn_q_a_norm"), eps)
        q = self.turned(ops.head_norm(linear(q_in, w, "attn_q_b"), None, size, eps), layer.rope, size)
        kv = ops.head_norm(linear(x, w, "attn_kv"), w("attn_kv_a_norm"), size, eps)
        kv, sinks = self.turned(kv, layer.rope, size), w.get("attn_sinks.weight")
        if ratio:
            entry, chosen = self.entry(x, w, cache, il), self.choose(x, q_in, w, cache, il)
            ops.kv_store(kv, cache.k, cache.cells, size)
            first = cache.first_entry
            ops.kv_store(entry, cache.k, cache.entry_cells, size, block=ratio, first=first)
            a = attend_entries(
                q, cache.k, cache.cells, cache.entry_cells, chosen, heads=layer.n_head, scale=layer.scale,
                window=self.window, block=ratio, first_entry=first, sinks=sinks,
            )  # fmt: skip
        else:
            ops.kv_store(kv, cache.k, cache.cells, size)
            a = ops.attention(
                q, cache.k, cache.v, cache.cells, heads=layer.n_head, kv_heads=1, head_dim_k=size,
                head_dim_v=size, scale=layer.scale, window=cache.window, sinks=sinks,
            )  # fmt: skip
        a = self.turned(a, f"{layer.rope}_back", size)
        return linear(mat_heads(a, w("attn_output_a"), self.n_group), w, "attn_output_b")

    def turned(self, x: Tensor, table: str, n: int) -> Tensor:
        return ops.rope(x, n, table, half_split=False)

    def entry(self, x: Tensor, w: Weights, cache: LayerCache, il: int) -> Tensor:
        """Return the entry of a block in the row of its last position. Store index keys of entries."""
        assert cache.raw
        names = ["attn_compressor", "indexer_compressor"][: 1 + self.indexed[il]]
        keys = [linear(x, w, f"{name}_kv") for name in names]
        raw = None
        for name, k in zip(names, keys, strict=True):
            gated = concat(k, linear(x, w, f"{name}_gate"), k.width, k.width)
            raw = gated if raw is None else concat(raw, gated, raw.width, gated.width)
        assert raw
        ops.kv_store(raw, cache.raw, cache.cells, raw.width)
        size = self.config.layers[il].head_dim
        if cache.index:
            n, first = self.index_dim, 2 * keys[0].width
            index = self.pooled(keys[1], w, cache, il, "indexer_compressor", "rope_of_index", n, first)
            ops.kv_store(index, cache.index, cache.entry_cells, n, block=self.ratios[il])
        return self.pooled(keys[0], w, cache, il, "attn_compressor", "rope_of_entries", size, 0)

    def pooled(
        self, k: Tensor, w: Weights, cache: LayerCache, il: int, name: str, table: str, n: int, first: int
    ) -> Tensor:
        assert cache.raw
        ratio, bias = self.ratios[il], w(f"{name}_places")
        y = pool_keys(k, cache.raw, cache.cells, ratio, bias, first=first, overlap=self.indexed[il])
        return self.turned(ops.head_norm(y, w(f"{name}_norm"), n, self.config.eps), f"{table}_{ratio}", n)

    def choose(self, x: Tensor, q_in: Tensor, w: Weights, cache: LayerCache, il: int) -> Tensor | None:
        if cache.index is None:
            return None
        q = self.turned(linear(q_in, w, "indexer.attn_q_b"), "rope_of_index", self.index_dim)
        gains, ratio = linear(x, w, "indexer.proj"), self.ratios[il]
        top_k = self.top_k + 1  # The incomplete block at the end has no entry.
        how = {"heads": self.n_index, "top_k": top_k, "block": ratio}
        return choose(q, gains, cache.index, cache.entry_cells, **how, tail=True)
