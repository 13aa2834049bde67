"""kimi-linear (Kimi-Linear-48B-A3B): layers with kv heads have latent attention without RoPE. Other layers
are delta nets with a gate per key channel. All but the first layers have a shared expert, and experts chosen
by sigmoid. Kimi Team 2025, arXiv:2510.26692.
"""

from __future__ import annotations

from collections.abc import Mapping

from vkbackend.errors import UnsupportedModel
from vkbackend.formats import block_of
from vkbackend.meta import ops
from vkbackend.meta.ops.recurrent import delta_gates, delta_net, ssm_conv
from vkbackend.meta.plan import columns, rows
from vkbackend.meta.policy import DeltaNet, Layer
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.latent import LatentAttention
from vkbackend.models.architectures.memory_specs import LayerMemory, LayerState, MemorySpec, StateSpec
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import read_count
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import Gating
from vkbackend.ops.recurrent import MAX_DELTA_HEAD
from vkbackend.rope import RopeTable


class Model(LatentAttention):
    mixture = Mixture(gating=Gating("sigmoid"))
    applies_rope = False
    bound = 0.0  # Bounds the decay's logarithm from below (0: no bound).

    def read_config(self, gguf: GGUF) -> Config:
        config = Config.from_gguf(gguf, self.mixture, low=0)
        self.recurrent = [not layer.n_head_kv for layer in config.layers]
        self.size, self.d_conv = read_count(gguf, "kda.head_dim"), read_count(gguf, "ssm.conv_kernel")
        if self.size % 16 or self.size > MAX_DELTA_HEAD or not 2 <= self.d_conv <= 16:
            raise UnsupportedModel(
                f"delta net heads of {self.size} with convolutions of {self.d_conv}: multiples "
                f"of 16 up to {MAX_DELTA_HEAD}, convolutions of 2 to 16 are supported"
            )
        return self.read_latent(gguf, config)

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        return {}

    # ---- weights ----

    def attention_weights(self, il: int) -> list[WeightSpec]:
        if self.recurrent[il]:
            return self.delta_weights(il)
        return super().attention_weights(il)

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
        return [
            *specs,
            *self.gate_weights(n),
            WeightSpec("ssm_beta", (n_head, n_embd), by_heads),
            WeightSpec("ssm_a", (n_head,), by_heads, source=f"{prefix}ssm_a"),
            WeightSpec("ssm_dt", (n,), by_heads, source=f"{prefix}ssm_dt.bias"),
            WeightSpec("ssm_norm", (size,)),
            WeightSpec("attn_output", (n_embd, n), columns("k_heads")),
        ]

    def gate_weights(self, n: int) -> list[WeightSpec]:
        """Return the weights of the decay and of the gate, with n outputs each."""
        size, n_embd = self.size, self.config.n_embd
        specs = []
        for name in ("ssm_f", "ssm_g"):  # The first of the two matrices is small and not split.
            specs.append(WeightSpec(f"{name}_a", (size, n_embd)))
            specs.append(WeightSpec(f"{name}_b", (n, size), rows("k_heads")))
        return specs

    def kv(self, il: int) -> MemorySpec:
        if not self.recurrent[il]:
            return super().kv(il)
        n_head, size = self.config.layers[il].n_head, self.size
        conv = [(f"conv_{name}", (size * (self.d_conv - 1),)) for name in "qkv"]
        return StateSpec(n_head, (*conv, ("delta", (size * size,))))

    def layer(self, il: int, types: Mapping[str, str]) -> Layer:
        if not self.recurrent[il]:
            return super().layer(il, types)
        block = block_of(types[f"blk.{il}.attn_output.weight"])[0]
        mixer = DeltaNet(self.config.layers[il].n_head, self.size, block)
        return Layer(mixer, self.feed_forward_of(il, types), "recurrent")

    # ---- graph ----

    def mix(self, x: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        if isinstance(cache, LayerState):
            return self.delta_net(x, w, cache)
        return super().mix(x, w, cache, il)

    def delta_net(self, x: Tensor, w: Weights, state: LayerState) -> Tensor:
        eps = self.config.eps
        parts = [
            ssm_conv(linear(x, w, f"attn_{name}"), w(f"ssm_conv1d_{name}"), state.arrays[f"conv_{name}"])
            for name in "qkv"
        ]
        decay, gate = self.decay_and_gate(x, w)
        g, beta = delta_gates(decay, w("ssm_dt"), w("ssm_a"), linear(x, w, "ssm_beta"), self.bound)
        o = delta_net(parts, g, beta, state.arrays["delta"], head_dim=self.size, tiled=False, eps=eps)
        o = ops.head_norm(o, w("ssm_norm"), self.size, eps)
        return linear(ops.sigmoid_mul(gate, o), w, "attn_output")

    def decay_and_gate(self, x: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
        decay, gate = (linear(linear(x, w, f"ssm_{name}_a"), w, f"ssm_{name}_b") for name in "fg")
        return decay, gate
