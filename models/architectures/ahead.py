"""Multi-token prediction (MTP; DeepSeek-AI 2024, arXiv:2412.19437, section 2.2). A head drafts tokens, which
the model then verifies.

A head is a layer after the model's own layers, called `nextn` in files. At position p it reads the token at p
and the model's state h at p - 1, and predicts the token at p + 1:

    x = eh_proj [enorm(embed(token)); hnorm(h)]
    g = shared_head_norm(block(x))
    logits = output(g)

Both h and g are results of a final norm. To draft further, the head reads its own g at p instead of h.

The K and V of a position need x, but no attention. So a step of the model stores the head's K and V for all
rows, and computes nothing else of the head. A drafting step computes one row per sequence. The cache keeps
the latest rows of h, and while drafting the rows of g, by slot and position. A sequence that continues from
cached blocks lacks the h of the position before. It reads an old row instead, which only makes a draft worse.
"""

from __future__ import annotations

from dataclasses import replace

from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.ops.heads import concat
from vkbackend.meta.ops.kept_rows import keep_rows, rows_before
from vkbackend.meta.plan import rows
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.memory_specs import KVSpec, LayerCache, LayerMemory, MemorySpec
from vkbackend.models.architectures.weight_specs import WeightSpec


class PredictsAhead(Decoder):
    """A decoder with `n_ahead` heads, 0 or 1. The head is the last layer."""

    predicts_ahead = True

    def is_ahead(self, il: int) -> bool:
        return il >= self.n_layer - self.n_ahead

    # ---- weights ----

    def layer_weights(self, il: int) -> list[WeightSpec]:
        specs = super().layer_weights(il)
        return [*specs, *self.ahead_weights(il)] if self.is_ahead(il) else specs

    def ahead_weights(self, il: int) -> list[WeightSpec]:
        n_embd, n_vocab = self.config.n_embd, self.config.n_vocab
        optional = [
            WeightSpec("nextn.embed_tokens.weight", (n_vocab, n_embd), host=True),
            WeightSpec("nextn.shared_head_head.weight", (n_vocab, n_embd), rows("vocab")),
        ]
        return [
            WeightSpec("nextn.eh_proj.weight", (n_embd, 2 * n_embd)),
            WeightSpec("nextn.enorm.weight", (n_embd,)),
            WeightSpec("nextn.hnorm.weight", (n_embd,)),
            WeightSpec("nextn.shared_head_norm.weight", (n_embd,), source="output_norm.weight"),
            *(spec for spec in optional if f"blk.{il}.{spec.name}" in self._shapes),
        ]

    def kv(self, il: int) -> MemorySpec:
        spec = super().kv(il)
        if self.is_ahead(il):
            assert isinstance(spec, KVSpec), f"the head, layer {il}, has no attention"
            return replace(spec, n_kept=self.config.n_embd)
        return spec

    # ---- graph ----

    def forward(self, graph: Graph, w: Weights, caches: list[LayerMemory]) -> None:
        if not self.n_ahead:
            super().forward(graph, w, caches)
            return
        *layers, cache = caches
        assert isinstance(cache, LayerCache)
        if graph.kind.wanted.ahead:
            self.draft(graph, w, cache)
            return
        h = self.residual(graph, w, layers)
        self.head(h, graph, w)
        self.prepare(h, graph, w, cache)

    def prepare(self, h: Tensor, graph: Graph, w: Weights, cache: LayerCache) -> None:
        """Store the head's K and V for all rows, and the states that later steps read."""
        assert cache.kept
        il = self.n_layer - 1
        with graph.scope(f"blk.{il}"):
            h = self.output_norm(h, w)
            x = self.entry(rows_before(graph, h, cache.kept), graph, w)
            self.store(self.norm_ahead(x, w.layer(il), "attn_norm"), w.layer(il), cache, il)
            keep_rows(h, cache.kept)

    def draft(self, graph: Graph, w: Weights, cache: LayerCache) -> None:
        """Compute one row per sequence and the logits of its next token."""
        assert cache.kept
        il = self.n_layer - 1
        layer = w.layer(il)
        with graph.scope(f"blk.{il}"):
            x = self.entry(rows_before(graph, None, cache.kept), graph, w)
            g = self.norm_ahead(self.ahead_block(x, layer, cache, il), layer, "nextn.shared_head_norm")
            keep_rows(g, cache.kept)
        separate = layer.has("nextn.shared_head_head")
        output = layer("nextn.shared_head_head") if separate else w("output")
        ops.logits(self.scaled(ops.outputs(g)), output, softcap=self.config.softcap)

    def entry(self, h: Tensor, graph: Graph, w: Weights) -> Tensor:
        """Return the head's input: for each token of the step, its embedding combined with `h`, the model's
        state at the position before."""
        layer, n_embd = w.layer(self.n_layer - 1), self.config.n_embd
        separate = layer.has("nextn.embed_tokens")
        e = ops.embed(graph, layer("nextn.embed_tokens")) if separate else self.embedded(graph, w)
        e, h = self.norm_ahead(e, layer, "nextn.enorm"), self.norm_ahead(h, layer, "nextn.hnorm")
        return linear(concat(e, h, n_embd, n_embd), layer, "nextn.eh_proj")

    def norm_ahead(self, x: Tensor, w: Weights, name: str) -> Tensor:
        return ops.rms_norm(x, w(name), self.config.eps)

    def ahead_block(self, x: Tensor, w: Weights, cache: LayerCache, il: int) -> Tensor:
        return self.block(x, w, cache, il)
