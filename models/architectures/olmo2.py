"""olmo2 (OLMo 2 and 3): norms only after attention and FFN, and norms of q and k over all heads. In OLMo 3,
three of four layers have a window and unscaled RoPE. OLMo team 2024, arXiv:2501.00656; 2025,
arXiv:2512.13961.
"""

from __future__ import annotations

from dataclasses import replace

from vkbackend.models.architectures.config import Config, with_windows
from vkbackend.models.architectures.reading import read_float, read_windowed
from vkbackend.models.architectures.wide_normed import WideNormed
from vkbackend.models.gguf.reader import GGUF
from vkbackend.rope import RopeTable

PERIOD = 4


class Model(WideNormed):
    windows = True
    pre_norms = False
    post_norms = True

    def read_config(self, gguf: GGUF) -> Config:
        c = super().read_config(gguf)
        window = int(gguf.u32("olmo2.attention.sliding_window", 0))
        c = with_windows(c, window, read_windowed(gguf, len(c.layers), PERIOD))
        layers = [replace(layer, rope="rope_swa") if layer.window else layer for layer in c.layers]
        return replace(c, layers=tuple(layers))

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        tables = super().read_ropes(gguf)
        if not any(layer.window for layer in self.config.layers):
            return tables
        base = read_float(gguf, "rope.freq_base_swa", tables["rope"].freq_base)
        return tables | {"rope_swa": RopeTable(tables["rope"].n_rot, base)}
