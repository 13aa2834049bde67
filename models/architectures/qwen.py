"""qwen (Qwen 1): qwen2 with one tensor for q, k and v. The FFN has half the width that the file states. Bai
et al. 2023, arXiv:2309.16609.
"""

from __future__ import annotations

from dataclasses import replace

from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.gguf.reader import GGUF


class Model(Decoder):
    def read_config(self, gguf: GGUF) -> Config:
        c = super().read_config(gguf)
        return replace(c, layers=tuple(replace(layer, n_ff=layer.n_ff // 2) for layer in c.layers))
