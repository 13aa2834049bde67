"""step35 (Step 3.5 Flash, 3.7 Flash, the text part): windowed layers have another number of heads and another
RoPE base. In windowed layers RoPE rotates whole heads, in other layers half of each head. A gate per head
multiplies attention's result. Some layers bound the FFN's activations. Layers without a dense FFN in the file
have experts and a shared expert. StepFun 2026.
"""

from __future__ import annotations

from dataclasses import replace

from vkbackend.meta import ops
from vkbackend.meta.plan import rows
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.config import Config, dense_if_stored, with_limits, with_windows
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import (
    read_count,
    read_factors,
    read_float,
    read_floats,
    read_rope,
    read_windowed,
)
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import Gating
from vkbackend.rope import RopeTable


class Model(Decoder):
    mixture = Mixture(gating=Gating("sigmoid"))
    windows = True
    freq_factors = True

    def read_config(self, gguf: GGUF) -> Config:
        c = with_limits(dense_if_stored(super().read_config(gguf), gguf), gguf)
        local = read_windowed(gguf, len(c.layers), 0)
        c = with_windows(c, read_count(gguf, "attention.sliding_window"), local, "rope_swa")
        self.limits = read_floats(gguf, "swiglu_clamp_shexp", len(c.layers), low=0.0)
        layers = [la if la.window else replace(la, n_rot=la.n_rot // 2) for la in c.layers]
        return replace(c, layers=tuple(layers))

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        n_rot = read_count(gguf, "rope.dimension_count", self.config.layers[0].head_dim)
        factors = read_factors(gguf, "rope_freqs.weight")
        table = read_rope(
            gguf, n_rot // 2, self.config.n_ctx_train, None if factors is None else factors[: n_rot // 4]
        )
        base = read_float(gguf, "rope.freq_base_swa", table.freq_base)
        return {"rope": table, "rope_swa": RopeTable(n_rot, base)}

    def attention_weights(self, il: int) -> list[WeightSpec]:
        gate = WeightSpec("attn_gate", (self.config.layers[il].n_head, self.config.n_embd), rows("heads"))
        return [*super().attention_weights(il), *self.head_norm_weights(il), gate]

    def gate(self, a: Tensor, x: Tensor, w: Weights) -> Tensor:
        return ops.gate_heads(linear(x, w, "attn_gate"), a, self.config.layers[0].head_dim_v)

    def feed_forward(self, x: Tensor, w: Weights, il: int) -> Tensor:
        if not self.limits[il]:
            return super().feed_forward(x, w, il)
        a = ops.silu_mul_clamped(linear(x, w, "ffn_gate"), linear(x, w, "ffn_up"), self.limits[il])
        return linear(a, w, "ffn_down")
