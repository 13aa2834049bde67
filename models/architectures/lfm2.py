"""lfm2 (LFM2): layers without kv heads are short convolutions between two gates. The other layers have
attention with norms of q and k heads. A plan splits a convolution's channels as if each were a key head of
size 1. Liquid AI 2025, arXiv:2511.23404.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vkbackend.errors import UnsupportedModel
from vkbackend.formats import block_of
from vkbackend.meta import ops
from vkbackend.meta.ops.recurrent import ssm_conv
from vkbackend.meta.plan import columns, rows
from vkbackend.meta.policy import DeltaNet, Layer
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.memory_specs import LayerMemory, LayerState, MemorySpec, StateSpec
from vkbackend.models.architectures.reading import read_count
from vkbackend.models.architectures.weight_specs import WeightSpec, fused
from vkbackend.models.gguf.reader import GGUF

GATES = (
    "shortconv_b",
    "shortconv_c",
    "shortconv_x",
)  # One tensor contains both gates, then the values.


class Model(Decoder):
    def read_config(self, gguf: GGUF) -> Config:
        config = Config.from_gguf(gguf, self.mixture, low=0)
        self.recurrent = [not layer.n_head_kv for layer in config.layers]
        self.d_conv = read_count(gguf, "shortconv.l_cache")
        if not 2 <= self.d_conv <= 16:
            raise UnsupportedModel(f"convolutions of {self.d_conv}: 2 to 16 are supported")
        return config

    # ---- weights ----

    def weights(self) -> list[WeightSpec]:
        specs = super().weights()
        # Published files call the final norm token_embd_norm.
        old = {"output_norm.weight": "token_embd_norm.weight"}
        return [replace(spec, source=old.get(spec.name, spec.source)) for spec in specs]

    def attention_weights(self, il: int) -> list[WeightSpec]:
        if not self.recurrent[il]:
            return [*super().attention_weights(il), *self.head_norm_weights(il)]
        n = self.config.n_embd
        return [
            WeightSpec("attn_norm", (n,)),
            *(WeightSpec(name, (n, n), rows("k_heads")) for name in GATES),
            WeightSpec("shortconv.conv.weight", (n, self.d_conv), rows("k_heads"), f32=True),
            WeightSpec("shortconv.out_proj.weight", (n, n), columns("k_heads")),
        ]

    def _as_stored(self, specs: list[WeightSpec], prefix: str) -> list[WeightSpec]:
        by_name = {spec.name: spec for spec in super()._as_stored(specs, prefix)}
        gates = [by_name[name] for name in (f"{prefix}{gate}.weight" for gate in GATES) if name in by_name]
        by_name |= {spec.name: spec for spec in fused(f"{prefix}shortconv.in_proj.weight", gates)}
        return list(by_name.values())

    def kv(self, il: int) -> MemorySpec:
        if not self.recurrent[il]:
            return super().kv(il)
        return StateSpec(self.config.n_embd, (("conv", (self.d_conv - 1,)),))

    def layer(self, il: int, types: Mapping[str, str]) -> Layer:
        if not self.recurrent[il]:
            return super().layer(il, types)
        block = block_of(types[f"blk.{il}.shortconv.out_proj.weight"])[0]
        return Layer(DeltaNet(self.config.n_embd, 1, block), self.feed_forward_of(il, types), "recurrent")

    # ---- graph ----

    def mix(self, x: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        if not isinstance(cache, LayerState):
            return super().mix(x, w, cache, il)
        before, after, x = (linear(x, w, name) for name in GATES)
        taps, state = w("shortconv.conv"), cache.arrays["conv"]
        y = ssm_conv(ops.mul(before, x), taps, state, silu=False)
        return linear(ops.mul(after, y), w, "shortconv.out_proj")
