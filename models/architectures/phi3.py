"""phi3 (Phi-3, Phi-4): llama with fused tensors for q, k and v and for gate and up. RoPE is half-split and
has frequency factors for short and for long contexts (longrope). Some models rotate a part of each head and
have a window. Abdin et al. 2024, arXiv:2404.14219; Ding et al. 2024, arXiv:2402.13753.
"""

from __future__ import annotations

from dataclasses import replace

from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.gguf.reader import GGUF


class Model(Decoder):
    freq_factors = True
    windows = True

    def read_config(self, gguf: GGUF) -> Config:
        config = super().read_config(gguf)
        window = int(gguf.u32("phi3.attention.sliding_window", 0))
        return replace(config, layers=tuple(replace(layer, window=window) for layer in config.layers))
