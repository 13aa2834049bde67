"""llama4 (the text models of Llama 4 Scout and Maverick): three of four layers attend within chunks of 8,192
positions, with RoPE. In layers with RoPE, the heads of q and k have norms without weights, except in models
with 128 experts. The fourth layer attends to all positions without RoPE, and scales q by a temperature. Every
layer or every second layer has a shared expert, and routed experts whose inputs are multiplied by sigmoids.
Meta 2025, "The Llama 4 herd".
"""

from __future__ import annotations

from dataclasses import replace

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import read_count, read_windowed
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import Gating
from vkbackend.rope import RopeTable

PERIOD = 4
CHUNK = 8192  # The default. If 0, all layers use RoPE and attend to all positions.
TEMPERATURE = 0.1
N_EXPERT_WITHOUT_NORMS = 128


class Model(Decoder):
    windows = True
    freq_factors = True
    half_split = False
    mixture = Mixture(gating=Gating("sigmoid", norm_w=False), weighs_input=True)

    def read_config(self, gguf: GGUF) -> Config:
        read_count(gguf, "expert_used_count")  # Optional in `read_mixtures`.
        self.chunk = int(gguf.u32("llama4.attention.sliding_window", CHUNK))
        n_ff, n_shared = (read_count(gguf, f"{of}feed_forward_length") for of in ("", "expert_"))
        c = Config.from_gguf(gguf, replace(self.mixture, n_shared=n_shared))
        step = int(gguf.u32("llama4.interleave_moe_layer_step"))
        n_layer = len(c.layers)
        self.turned = read_windowed(gguf, n_layer, PERIOD) if self.chunk else (True,) * n_layer
        layers = []
        for il, (layer, turned) in enumerate(zip(c.layers, self.turned, strict=True)):
            routed = step > 0 and (il + 1) % step == 0
            layer = replace(layer, chunk=self.chunk if turned else 0, n_ff=n_ff)
            layers.append(layer if routed else replace(layer, mixture=None))
        self.normed = c.layers[0].mixture and c.layers[0].mixture.n_expert != N_EXPERT_WITHOUT_NORMS
        return replace(c, layers=tuple(layers))

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        n = self.config.layers[0].n_rot
        still = RopeTable(
            n,
            sections=(0, 0, 0, n // 2),
            temperature=TEMPERATURE,
            temperature_length=int(gguf.u32("llama4.attention.temperature_length", CHUNK)),
            temperature_offset=1,
        )
        return super().read_ropes(gguf) | {"still_q": still}

    def has_rope(self, il: int) -> bool:
        return self.turned[il]

    def rotate(self, x: Tensor, w: Weights, name: str, il: int) -> Tensor:
        head_dim = self.config.layers[il].head_dim
        if not self.turned[il]:
            return ops.rope(x, head_dim, "still_q") if name == "attn_q" else x
        x = super().rotate(x, w, name, il)
        return ops.head_norm(x, None, head_dim, self.config.eps) if self.normed else x
