"""exaone4 (EXAONE 4): norms only after attention and FFN, and norms of q and k heads. If the file has a
window, three of four layers use it, and the fourth has no RoPE. LG AI Research 2025, arXiv:2507.11407.
"""

from __future__ import annotations

from vkbackend.models.architectures.config import Config, with_windows
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.reading import read_windowed
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF

PERIOD = 4


class Model(Decoder):
    windows = True
    freq_factors = True
    pre_norms = False
    post_norms = True

    def read_config(self, gguf: GGUF) -> Config:
        c = super().read_config(gguf)
        window = int(gguf.u32("exaone4.attention.sliding_window", 0))
        self.everywhere = not window  # every layer has RoPE
        return with_windows(c, window, read_windowed(gguf, len(c.layers), PERIOD))

    def attention_weights(self, il: int) -> list[WeightSpec]:
        return [*super().attention_weights(il), *self.head_norm_weights(il)]

    def has_rope(self, il: int) -> bool:
        return self.everywhere or bool(self.config.layers[il].window)
