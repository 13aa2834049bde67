"""The graph of the pre-norm decoder, which most architectures extend.

Each architecture's file states its differences and cites its papers. Metadata keys and tensor names are as in
llama.cpp.
"""

from __future__ import annotations

from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.decoder_weights import RESIDUALS, DecoderWeights
from vkbackend.models.architectures.memory_specs import KeyRotation, LayerCache, LayerMemory
from vkbackend.step import MAX_RUNS


def tap_of(il: int) -> str:
    return f"input of layer {il}"


class Decoder(DecoderWeights):
    residual_is_wide = False  # Whether `residual` returns more than a hidden state.
    predicts_ahead = False  # Whether the architecture's multi-token prediction head is supported.

    def forward(self, graph: Graph, w: Weights, caches: list[LayerMemory]) -> None:
        self.head(self.residual(graph, w, caches), graph, w)

    def residual(self, graph: Graph, w: Weights, caches: list[LayerMemory]) -> Tensor:
        """Return the residual after the last layer."""
        if graph.kind.stage >= 0:
            return self.staged(graph, w, caches)
        h = self.embedded(graph, w)
        for il, cache in graph.recorded_layers(caches):
            with graph.scope(f"blk.{il}"):
                before = h
                h = self.steered(self.block(h, w.layer(il), cache, il), w.layer(il), il)
                if graph.kind.images and il < self.n_deepstack:
                    h = h + ops.image_rows(graph, 1 + il)
                self.tap(before, il)
        return h

    def tap(self, h: Tensor, il: int) -> None:
        """Keep the layer's input h if an EAGLE-3 head reads it. Before this call, the layer's norm has summed
        h's partial sums."""
        if il in self.tapped:
            h.graph.kept[tap_of(il)] = ops.copy(h)

    def staged(self, graph: Graph, w: Weights, caches: list[LayerMemory]) -> Tensor:
        """Compute one stage for one part of a text, and return the residual. Only encoders compute long texts
        this way.

        Stage 0 embeds the tokens, and stage il + 1 computes layer il. Each stage stores the residual, and K
        and V for the next layer. When a stage begins, all parts of the text have finished the stage before.
        Stages use two caches alternately.
        """
        stage, store = graph.kind.stage, w(RESIDUALS)
        first = caches[0]
        assert isinstance(first, LayerCache)
        if stage == 0:
            h = self.embed(graph, w)
        else:
            il = stage - 1
            with graph.scope(f"blk.{il}"):
                h = ops.kv_load(graph, store, first.cells)
                h = self.steered(self.block(h, w.layer(il), caches[il], il), w.layer(il), il)
        if stage < len(caches):
            cache = caches[stage]
            assert isinstance(cache, LayerCache)
            with graph.scope(f"blk.{stage}"):
                h = ops.whole(h)
                self.store(self.attention_input(h, w.layer(stage), stage), w.layer(stage), cache, stage)
                ops.kv_store(h, store, first.cells, h.width)
        return h

    def attention_input(self, h: Tensor, w: Weights, il: int) -> Tensor:
        """Return the input of attention: the residual, normalized if the layer has a norm before
        attention."""
        return ops.rms_norm(h, w("attn_norm"), self.config.eps) if self.pre_norms else h

    def steered(self, h: Tensor, w: Weights, il: int) -> Tensor:
        return ops.add_vector(h, w("control_vector")) if il in self.control else h

    def head(self, h: Tensor, graph: Graph, w: Weights) -> None:
        if graph.n_outputs and graph.kind.wanted.hidden:
            ops.hidden_states(self.hidden_outputs(h, w))
        elif graph.n_outputs:
            x, bias = self.normed_outputs(h, w), w.bias("output")
            ops.logits(x, w("output"), softcap=self.config.softcap, bias=bias)

    def normed_outputs(self, h: Tensor, w: Weights) -> Tensor:
        return self.scaled(self.hidden_outputs(h, w))

    def hidden_outputs(self, h: Tensor, w: Weights) -> Tensor:
        """Return the hidden states of the output rows, after the final norm."""
        return self.output_norm(ops.outputs(h), w)

    def scaled(self, x: Tensor) -> Tensor:
        """Scale the input of the output matrix. The default returns `x`."""
        return x

    def output_norm(self, x: Tensor, w: Weights) -> Tensor:
        return ops.rms_norm(x, w("output_norm"), self.config.eps)

    def embedded(self, graph: Graph, w: Weights) -> Tensor:
        """Return the first layer's input: embeddings of tokens, and rows of images. Only the embeddings are
        scaled."""
        h = self.embed(graph, w)
        return ops.with_images(h) if graph.kind.images else h

    def embed(self, graph: Graph, w: Weights) -> Tensor:
        return ops.embed(graph, w("token_embd"))

    def block(self, h: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        eps = self.config.eps
        a = self.mix(self.attention_input(h, w, il), w, cache, il)
        h = h + (ops.rms_norm(a, w("post_attention_norm"), eps) if self.post_norms else a)
        f = self.ffn(h, w, il)
        return h + (ops.rms_norm(f, w("post_ffw_norm"), eps) if self.post_norms else f)

    def mix(self, x: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        """Apply the part of a layer in which positions interact, by default attention."""
        assert isinstance(cache, LayerCache), f"layer {il} has no attention"
        return self.attention(x, w, cache, il)

    def ffn(self, h: Tensor, w: Weights, il: int) -> Tensor:
        """Return FFN(norm(h)) or experts(norm(h)), without the residual."""
        eps, mixture = self.config.eps, self.config.layers[il].mixture
        x = ops.rms_norm(h, w(self.pre_ffn_norm), eps) if self.pre_norms else h
        return mixture.forward(x, h, w(self.pre_ffn_norm), w, eps) if mixture else self.feed_forward(x, w, il)

    def attention(self, x: Tensor, w: Weights, cache: LayerCache, il: int) -> Tensor:
        q = self.rotate(self.projected(x, w, "attn_q"), w, "attn_q", il)
        if q.graph.kind.stage < 0 and (not cache.shared or self.encodes):
            self.store(x, w, cache, il)
        return self.attend(q, x, w, cache, il)

    def attend(self, q: Tensor, x: Tensor, w: Weights, cache: LayerCache, il: int) -> Tensor:
        """Attend with q (after RoPE) to the caches, then apply the gate and the output projection."""
        layer = self.config.layers[il]
        a = ops.attention(
            q,
            cache.k,
            cache.v,
            cache.cells,
            heads=layer.n_head,
            kv_heads=layer.n_head_kv,
            head_dim_k=layer.head_dim,
            head_dim_v=layer.head_dim_v,
            scale=layer.scale,
            window=layer.window if self.encodes else cache.window,
            chunk=layer.chunk,
            first=layer.first,
            softcap=self.config.attn_softcap,
            sinks=w.get("attn_sinks.weight"),
            causal=not self.encodes,
            sees_end=q.graph.kind.sees_end and self.sees_end(il),
            n_runs=MAX_RUNS if q.graph.kind.sees_end else 0,
            slopes=w.get("attn_slopes.weight"),
        )
        return linear(self.gate(a, x, w), w, "attn_output")

    def sees_end(self, il: int) -> bool:
        """Return whether, in this layer, the rows of an image may attend to later rows of the image."""
        return True

    def gate(self, a: Tensor, x: Tensor, w: Weights) -> Tensor:
        """Apply the output gate to attention's result `a`. The default returns `a`."""
        return a

    def store(self, x: Tensor, w: Weights, cache: LayerCache, il: int) -> None:
        k, v = self.projected(x, w, "attn_k"), self.projected(x, w, "attn_v")
        layer = self.config.layers[il]
        ops.kv_store(self.rotate(k, w, "attn_k", il), cache.k, cache.cells, layer.head_dim)
        ops.kv_store(v, cache.v, cache.cells, layer.head_dim_v)

    def projected(self, x: Tensor, w: Weights, name: str) -> Tensor:
        """Return q, k or v, clamped if the file has a limit."""
        y, limit = linear(x, w, name), self.config.clamp
        return ops.clamp(y, -limit, limit) if limit else y

    def rotate(self, x: Tensor, w: Weights, name: str, il: int) -> Tensor:
        """Apply the norm, if the file has one, and RoPE to q or k. `name` is `attn_q` or `attn_k`."""
        layer = self.config.layers[il]
        if w.has(f"{name}_norm"):
            x = ops.head_norm(x, w(f"{name}_norm"), layer.head_dim, self.config.eps)
        if not self.has_rope(il):
            return x
        return ops.rope(x, layer.head_dim, layer.rope, half_split=self.half_split)

    def has_rope(self, il: int) -> bool:
        return True

    def key_rotation(self, il: int) -> KeyRotation | None:
        """Return the RoPE of the cached keys, or None without RoPE. Raises UnsupportedModel if RoPE cannot
        move a key to another position."""
        return KeyRotation(self.config.layers[il].rope, self.half_split) if self.has_rope(il) else None

    def feed_forward(self, x: Tensor, w: Weights, il: int) -> Tensor:
        gate, up = linear(x, w, "ffn_gate") if self.gated else None, linear(x, w, "ffn_up")
        y = self.activate_alone(up, il) if gate is None else self.activate(gate, up)
        return linear(y, w, "ffn_down")

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return ops.silu_mul(gate, up)

    def activate_alone(self, x: Tensor, il: int) -> Tensor:
        """Apply the activation of an FFN without a gate, by default GELU."""
        return ops.gelu(x)
