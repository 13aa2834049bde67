"""kimi-k3 (Kimi K3, its text part): kimi-linear with residuals that attend to earlier layers. Every N-th
layer keeps its input and begins a new residual. Attention and FFN read a sum of the kept inputs and the
residual, weighted by the softmax of their scores. Routed experts read and write a latent vector. The
activation is SiTU, and gates multiply the results of latent attention. Moonshot AI 2026.
"""

from __future__ import annotations

from dataclasses import replace

from vkbackend.errors import GGUFError
from vkbackend.meta import ops
from vkbackend.meta.graph import Graph
from vkbackend.meta.ops import streams
from vkbackend.meta.ops.heads import concat
from vkbackend.meta.plan import rows
from vkbackend.meta.tensor import Tensor, Weight
from vkbackend.models.architectures import kimi_linear
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.memory_specs import LayerMemory
from vkbackend.models.architectures.reading import read_count, read_float
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF


class Model(kimi_linear.Model):
    residual_is_wide = True

    def read_config(self, gguf: GGUF) -> Config:
        self.bound = read_float(gguf, "kda.gate_lower_bound", 0.0)
        self.period = read_count(gguf, "attn_res.block_size")
        beta = read_float(gguf, "activation.situ_beta", 0.0)
        self.situ = beta, read_float(gguf, "activation.situ_linear_beta", 0.0)
        if self.bound > 0 or self.situ[0] <= 0 or self.situ[1] < 0:
            raise GGUFError(
                f"{gguf.paths[0]}: kda.gate_lower_bound is {self.bound}, expected at most 0; activation.situ_"
                f"beta and situ_linear_beta are {self.situ}, expected positive numbers"
            )
        c, n_latent = super().read_config(gguf), int(gguf.u32("kimi-k3.expert_latent_length", 0))
        layers = [
            replace(la, mixture=la.mixture and replace(la.mixture, n_latent=n_latent, situ=self.situ))
            for la in c.layers
        ]
        self.differing = range(len(layers))  # each layer may read more kept inputs than the layer before
        return replace(c, layers=tuple(layers))

    # ---- weights ----

    def outer_weights(self) -> list[WeightSpec]:
        return [*super().outer_weights(), WeightSpec("output_res_score.weight", (self.config.n_embd,))]

    def attention_weights(self, il: int) -> list[WeightSpec]:
        n_embd, n = self.config.n_embd, self.config.layers[il].n_head * self.size_v
        specs = [*super().attention_weights(il), WeightSpec("attn_res_score", (n_embd,))]
        if f"blk.{il}.attn_gate.weight" in self._shapes:
            specs.append(WeightSpec("attn_gate", (n, n_embd), rows("heads")))
        return specs

    def gate_weights(self, n: int) -> list[WeightSpec]:
        kept = [spec for spec in super().gate_weights(n) if spec.name.startswith("ssm_f_")]
        return [*kept, WeightSpec("ssm_g", (n, self.config.n_embd), rows("k_heads"))]

    def feed_forward_weights(self, il: int) -> list[WeightSpec]:
        return [*super().feed_forward_weights(il), WeightSpec("ffn_res_score", (self.config.n_embd,))]

    # ---- graph ----

    def residual(self, graph: Graph, w: Weights, caches: list[LayerMemory]) -> Tensor:
        """Return the final sum of the kept inputs and the residual."""
        h, kept = self.embedded(graph, w), None
        for il, cache in graph.recorded_layers(caches):
            with graph.scope(f"blk.{il}"):
                layer = w.layer(il)
                x = self.attended(kept, h, layer("attn_res_score"))
                begins = il % self.period == 0
                if begins:
                    h = ops.whole(h)
                    kept = concat(ops.whole(kept), h, kept.width, h.width) if kept else h
                a = self.mix(ops.rms_norm(x, layer("attn_norm"), self.config.eps), layer, cache, il)
                h = a if begins else h + a
                x = self.attended(kept, h, layer("ffn_res_score"))
                x = ops.same_bits(x) if self.config.layers[il].mixture else x
                h = self.steered(h + self.ffn(x, layer, il), layer, il)
        return self.attended(kept, h, w("output_res_score"))

    def attended(self, kept: Tensor | None, h: Tensor, score: Weight) -> Tensor:
        return h if kept is None else streams.attend(kept, h, score, self.config.eps)

    def gate(self, a: Tensor, x: Tensor, w: Weights) -> Tensor:
        return ops.sigmoid_mul(linear(x, w, "attn_gate"), a) if w.has("attn_gate") else a

    def decay_and_gate(self, x: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
        return linear(linear(x, w, "ssm_f_a"), w, "ssm_f_b"), linear(x, w, "ssm_g")

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return ops.situ_mul(gate, up, *self.situ)
