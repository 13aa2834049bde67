"""gpt-oss (gpt-oss-20b, gpt-oss-120b): every projection has a bias, every second layer has a window, and
every head has an attention sink. A softmax over the chosen experts' logits weighs them. The experts'
activation is SwiGLU with clamped gate and up. OpenAI 2025, arXiv:2508.10925.
"""

from __future__ import annotations

from dataclasses import replace

from vkbackend.meta.plan import rows
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import read_windowed
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import Gating

PERIOD = 2  # Every PERIOD-th layer attends to all positions.


class Model(Decoder):
    mixture = Mixture(gating=Gating("softmax_weight", norm_w=False), act="swiglu_oai")
    pre_ffn_norm = "post_attention_norm"
    windows = True

    def read_config(self, gguf: GGUF) -> Config:
        config = super().read_config(gguf)
        window = int(gguf.u32("gpt-oss.attention.sliding_window", 0))
        windowed = read_windowed(gguf, len(config.layers), PERIOD)
        layers = [
            replace(layer, window=window) if local else layer
            for layer, local in zip(config.layers, windowed, strict=True)
        ]
        return replace(config, layers=tuple(layers))

    def attention_weights(self, il: int) -> list[WeightSpec]:
        sinks = WeightSpec("attn_sinks", (self.config.layers[il].n_head,), rows("heads"))
        return [*super().attention_weights(il), sinks]
