"""laguna (Laguna XS, S, M): attention's result is multiplied by the softplus of a gate, which has one value
per head or per element. Layers may differ in the number of heads. Windowed layers have their own RoPE without
scaling. All but the first layers have experts, chosen by a sigmoid plus a bias, and a shared expert. Poolside
2026.
"""

from __future__ import annotations

from dataclasses import replace

from vkbackend.meta import ops
from vkbackend.meta.plan import rows
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.config import Config, with_windows
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import read_count, read_flags, read_float, read_rope
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import Gating
from vkbackend.rope import RopeTable

PERIOD = 4  # The first of PERIOD layers attends to all positions.


class Model(Decoder):
    mixture = Mixture(gating=Gating("sigmoid"))
    windows = True

    def read_config(self, gguf: GGUF) -> Config:
        c = super().read_config(gguf)
        window = int(gguf.u32("laguna.attention.sliding_window", 0))
        if not window:
            return c
        key, n_layer = "attention.sliding_window_pattern", len(c.layers)
        if f"laguna.{key}" in gguf.metadata and gguf.metadata.kind(f"laguna.{key}")[1]:
            local = read_flags(gguf, key, n_layer)
        else:
            period = int(gguf.u32(f"laguna.{key}", PERIOD)) or 1
            local = tuple(il % period > 0 for il in range(n_layer))
        c = with_windows(c, window, local, "rope_swa")
        n_rot = read_count(gguf, "rope.dimension_count_swa", c.layers[0].n_rot)
        layers = [replace(layer, n_rot=n_rot) if layer.window else layer for layer in c.layers]
        return replace(c, layers=tuple(layers))

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        n_rot = read_count(gguf, "rope.dimension_count", self.config.layers[0].head_dim)
        table = read_rope(gguf, n_rot, self.config.n_ctx_train)
        n_rot = read_count(gguf, "rope.dimension_count_swa", n_rot)
        return {
            "rope": table,
            "rope_swa": RopeTable(n_rot, read_float(gguf, "rope.freq_base_swa", table.freq_base)),
        }

    def attention_weights(self, il: int) -> list[WeightSpec]:
        layer, n_embd = self.config.layers[il], self.config.n_embd
        elements = self._shapes.get(f"blk.{il}.attn_gate.weight") == (layer.n_head * layer.head_dim_v, n_embd)
        n_gates = layer.n_head * (layer.head_dim_v if elements else 1)
        gate = WeightSpec("attn_gate", (n_gates, n_embd), rows("heads"))
        return [*super().attention_weights(il), *self.head_norm_weights(il), gate]

    def gate(self, a: Tensor, x: Tensor, w: Weights) -> Tensor:
        gate = linear(x, w, "attn_gate")
        return ops.gate_heads(gate, a, a.width // gate.width, softplus=True)
