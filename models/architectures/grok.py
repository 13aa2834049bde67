"""grok (Grok-1, Grok-2): embeddings, q k^T and logits are multiplied by constants, and q k^T, the router's
logits and the logits have soft-caps. Norms precede and follow attention and experts. The weights of experts
are not normalised. Grok-2 adds a dense FFN. xAI 2024 and 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vkbackend.errors import UnsupportedModel
from vkbackend.formats import block_of
from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.policy import FeedForward
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.memory_specs import LayerMemory
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import read_count, read_float, read_rope
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import Gating
from vkbackend.rope import RopeTable

# Grok-1's constants, which older files do not state.
EMBEDDING_SCALE, LOGIT_SCALE = 78.38367176906169, 0.5773502691896257
SCORE_SCALE, SCORE_CAP = 0.08838834764831845, 30.0
BETA_FAST = 8.0


class Model(Decoder):
    mixture = Mixture(gating=Gating(norm_w=False), act="gelu")

    def read_config(self, gguf: GGUF) -> Config:
        read_count(gguf, "expert_count")  # Optional in `read_mixtures`.
        c = super().read_config(gguf)
        self.embedding_scale = read_float(gguf, "embedding_scale", EMBEDDING_SCALE)
        self.logit_scale = read_float(gguf, "logit_scale", LOGIT_SCALE)
        self.warm_from = int(gguf.u32("grok.attention.temperature_length", 0))
        self.dense = "blk.0.ffn_up.weight" in gguf.tensors
        scale = read_float(gguf, "attention.output_scale", SCORE_SCALE)
        cap = read_float(gguf, "router_logit_softcapping", 0.0, low=0.0)
        width = read_count(gguf, "feed_forward_length")
        layers = []
        for layer in c.layers:
            assert layer.mixture
            capped = replace(layer.mixture, gating=replace(layer.mixture.gating, softcap=cap))
            layers.append(replace(layer, n_ff=width, scale=scale, mixture=capped))
        return replace(
            c,
            layers=tuple(layers),
            softcap=read_float(gguf, "final_logit_softcapping", 0.0, low=0.0),
            attn_softcap=read_float(gguf, "attn_logit_softcapping", SCORE_CAP, low=0.0),
        )

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        table = read_rope(gguf, self.config.layers[0].n_rot, self.config.n_ctx_train)
        return {"rope": replace(table, beta_fast=read_float(gguf, "rope.scaling.yarn_beta_fast", BETA_FAST))}

    def ropes(self, n_ctx: int) -> dict[str, RopeTable]:
        if 0 < self.warm_from < n_ctx:
            raise UnsupportedModel(
                f"a context of {n_ctx}: from {self.warm_from} tokens on (attention.temperature_length) "
                f"scores grow with the position, which is not supported; give -c {self.warm_from}"
            )
        return super().ropes(n_ctx)

    # ---- weights ----

    def attention_weights(self, il: int) -> list[WeightSpec]:
        return [*super().attention_weights(il), WeightSpec("attn_output_norm", (self.config.n_embd,))]

    def feed_forward_weights(self, il: int) -> list[WeightSpec]:
        old = f"blk.{il}.layer_output_norm.weight"
        norm = WeightSpec("post_ffw_norm", (self.config.n_embd,), source=old)
        return [*super().feed_forward_weights(il), *(self.dense_weights(il) if self.dense else []), norm]

    def feed_forward_of(self, il: int, types: Mapping[str, str]) -> FeedForward:
        experts = super().feed_forward_of(il, types)
        if not self.dense:
            return experts
        block = block_of(types[f"blk.{il}.ffn_down.weight"])[0]
        return replace(experts, n_ff_shared=self.config.layers[il].n_ff, shared_block=block)

    # ---- graph ----

    def embed(self, graph: Graph, w: Weights) -> Tensor:
        return ops.scale(super().embed(graph, w), self.embedding_scale)

    def scaled(self, x: Tensor) -> Tensor:
        return ops.scale(x, self.logit_scale)

    def block(self, h: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        eps, mixture, norm = self.config.eps, self.config.layers[il].mixture, w(self.pre_ffn_norm)
        assert mixture
        a = self.mix(self.attention_input(h, w, il), w, cache, il)
        h = h + ops.rms_norm(a, w("attn_output_norm"), eps)
        x = ops.rms_norm(h, norm, eps)
        f = mixture.forward(x, h, norm, w, eps)
        if self.dense:
            f = ops.scale(f + self.feed_forward(x, w, il), 0.5**0.5)
        return h + ops.rms_norm(f, w("post_ffw_norm"), eps)

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return ops.gelu_mul(gate, up)
