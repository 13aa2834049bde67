"""kimi-linear (Kimi-Linear-48B-A3B): delta nets with a gate per key channel (Kimi Team 2025,
arXiv:2510.26692) in most layers, latent attention without RoPE (DeepSeek-AI 2024, arXiv:2405.04434) in those
with kv heads, sigmoid-routed experts beside a shared one behind the first, dense layers.

Latent attention is run as attention with one kv head: its key is the normed latent and what keys share, its
value the latent, and q and the result go through a matrix of every head. Names: llama.cpp's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.formats import block_of
from vkbackend.meta import ops, ops_recurrent
from vkbackend.meta.ops_heads import concat, mat_heads
from vkbackend.meta.plan import columns, rows
from vkbackend.meta.policy import Attention, DeltaNet, FeedForward, Layer
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import (
    KVSpec,
    LayerCache,
    LayerMemory,
    LayerState,
    StateSpec,
    Weights,
    WeightSpec,
    fused,
    linear,
    read_count,
)
from vkbackend.models.architectures.decoder import Config, Decoder
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import Gating
from vkbackend.ops.recurrent import MAX_DELTA_HEAD
from vkbackend.rope import RopeTable


class Model(Decoder):
    """The weights and the graph."""

    mixture = Mixture(gating=Gating("sigmoid"))

    def read_config(self, gguf: GGUF) -> Config:
        config = Config.from_gguf(gguf, self.mixture, low=0)
        self.recurrent = [not layer.n_head_kv for layer in config.layers]
        self.latent, self.shared = (
            read_count(gguf, key) for key in ("attention.kv_lora_rank", "rope.dimension_count")
        )
        width, self.size_v = (read_count(gguf, f"attention.{key}_length_mla") for key in ("key", "value"))
        self.nope = width - self.shared
        self.size, self.d_conv = read_count(gguf, "kda.head_dim"), read_count(gguf, "ssm.conv_kernel")
        if self.size % 16 or self.size > MAX_DELTA_HEAD or not 2 <= self.d_conv <= 16:
            raise UnsupportedModel(
                f"delta net heads of {self.size} with convolutions of {self.d_conv}: multiples "
                f"of 16 up to {MAX_DELTA_HEAD}, convolutions of 2 to 16 are supported"
            )
        layers = []
        for layer in config.layers:
            if layer.n_head_kv and (layer.head_dim != self.latent + self.shared or self.nope <= 0):
                raise GGUFError(
                    f"{gguf.paths[0]}: keys of {layer.head_dim} are not a latent of {self.latent} and "
                    f"{self.shared} that heads share"
                )
            layers.append(replace(layer, n_head_kv=1, head_dim_v=self.latent, scale=width**-0.5))
        return replace(config, layers=tuple(layers))

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        return {}

    # ---- weights ----

    def attention_weights(self, il: int) -> list[WeightSpec]:
        if self.recurrent[il]:
            return self.delta_weights(il)
        n_embd, n_head = self.config.n_embd, self.config.layers[il].n_head
        return [
            WeightSpec("attn_norm", (n_embd,)),
            WeightSpec("attn_q", (n_head * self.nope, n_embd), rows("heads")),
            WeightSpec("attn_q_shared", (n_head * self.shared, n_embd), rows("heads")),
            WeightSpec("attn_latent", (self.latent, n_embd), rows("kv_heads")),
            WeightSpec("attn_k_shared", (self.shared, n_embd), rows("kv_heads")),
            WeightSpec("attn_kv_a_norm", (self.latent,)),
            WeightSpec("attn_k_b", (n_head * self.latent, self.nope), rows("heads"), stacked=n_head),
            WeightSpec("attn_v_b", (n_head * self.size_v, self.latent), rows("heads"), stacked=n_head),
            WeightSpec("attn_output", (n_embd, n_head * self.size_v), columns("heads")),
        ]

    def delta_weights(self, il: int) -> list[WeightSpec]:
        n_embd, n_head, size, prefix = (
            self.config.n_embd,
            self.config.layers[il].n_head,
            self.size,
            f"blk.{il}.",
        )
        by_heads, n = rows("k_heads"), n_head * size
        specs = [WeightSpec("attn_norm", (n_embd,))]
        for name in "qkv":
            specs.append(WeightSpec(f"attn_{name}", (n, n_embd), by_heads))
            specs.append(WeightSpec(f"ssm_conv1d_{name}", (n, self.d_conv), by_heads, f32=True))
        for name in ("ssm_f", "ssm_g"):  # in two steps, over few values, whole everywhere
            specs.append(WeightSpec(f"{name}_a", (size, n_embd)))
            specs.append(WeightSpec(f"{name}_b", (n, size), by_heads))
        return [
            *specs,
            WeightSpec("ssm_beta", (n_head, n_embd), by_heads),
            WeightSpec("ssm_a", (n_head,), by_heads, source=f"{prefix}ssm_a"),
            WeightSpec("ssm_dt", (n,), by_heads, source=f"{prefix}ssm_dt.bias"),
            WeightSpec("ssm_norm", (size,)),
            WeightSpec("attn_output", (n_embd, n), columns("k_heads")),
        ]

    def _as_stored(self, specs: list[WeightSpec], prefix: str) -> list[WeightSpec]:
        by_name = {spec.name: spec for spec in super()._as_stored(specs, prefix)}
        for names, tensor, per_head in (
            (("attn_q", "attn_q_shared"), "attn_q", True),
            (("attn_latent", "attn_k_shared"), "attn_kv_a_mqa", False),
        ):
            full_names = [f"{prefix}{name}.weight" for name in names]
            if all(name in by_name for name in full_names):
                parts = [by_name[name] for name in full_names]
                repeat = parts[0].shape[0] // self.nope if per_head else 1
                by_name |= {spec.name: spec for spec in fused(f"{prefix}{tensor}.weight", parts, repeat)}
        return list(by_name.values())

    def kv(self, il: int) -> KVSpec | StateSpec:
        if not self.recurrent[il]:
            return super().kv(il)
        n_head, size = self.config.layers[il].n_head, self.size
        conv = [(f"conv_{name}", (size * (self.d_conv - 1),)) for name in "qkv"]
        return StateSpec(n_head, (*conv, ("delta", (size * size,))))

    def layer(self, il: int, types: Mapping[str, str]) -> Layer:
        layer, prefix = self.config.layers[il], f"blk.{il}."
        block = block_of(types[f"{prefix}attn_output.weight"])[0]
        mixer: Attention | DeltaNet = Attention(layer.n_head, 1, layer.head_dim, self.size_v, block)
        if self.recurrent[il]:
            mixer = DeltaNet(layer.n_head, self.size, block)
        kind = "recurrent" if self.recurrent[il] else ""
        if layer.mixture:
            return Layer(mixer, layer.mixture.feed_forward(types, prefix), kind)
        return Layer(mixer, FeedForward(layer.n_ff, block_of(types[f"{prefix}ffn_down.weight"])[0]), kind)

    # ---- graph ----

    def mix(self, x: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        if isinstance(cache, LayerState):
            return self.delta_net(x, w, cache)
        return super().mix(x, w, cache, il)

    def attention(self, x: Tensor, w: Weights, cache: LayerCache, il: int) -> Tensor:
        layer, latent, shared = self.config.layers[il], self.latent, self.shared
        q, q_shared, c, k_shared = (
            linear(x, w, name) for name in ("attn_q", "attn_q_shared", "attn_latent", "attn_k_shared")
        )
        c = ops.head_norm(c, w("attn_kv_a_norm"), latent, self.config.eps)
        ops.kv_store(concat(c, k_shared, latent, shared), cache.k, cache.cells)
        ops.kv_store(c, cache.v, cache.cells)
        q = concat(mat_heads(q, w("attn_k_b"), layer.n_head), q_shared, latent, shared)
        a = ops.attention(
            q,
            cache.k,
            cache.v,
            cache.cells,
            heads=layer.n_head,
            kv_heads=1,
            head_dim_k=latent + shared,
            head_dim_v=latent,
            scale=layer.scale,
        )
        return linear(mat_heads(a, w("attn_v_b"), layer.n_head), w, "attn_output")

    def delta_net(self, x: Tensor, w: Weights, state: LayerState) -> Tensor:
        eps = self.config.eps
        parts = [
            ops_recurrent.ssm_conv(
                linear(x, w, f"attn_{name}"), w(f"ssm_conv1d_{name}"), state.arrays[f"conv_{name}"]
            )
            for name in "qkv"
        ]
        decay, gate = (linear(linear(x, w, f"ssm_{name}_a"), w, f"ssm_{name}_b") for name in "fg")
        g, beta = ops_recurrent.delta_gates(decay, w("ssm_dt"), w("ssm_a"), linear(x, w, "ssm_beta"))
        o = ops_recurrent.delta_net(
            parts, g, beta, state.arrays["delta"], head_dim=self.size, tiled=False, eps=eps
        )
        o = ops.head_norm(o, w("ssm_norm"), self.size, eps)
        return linear(ops.sigmoid_mul(gate, o), w, "attn_output")
