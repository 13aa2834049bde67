"""mellum (Mellum 2): qwen3moe, but three of four layers have a window, another RoPE base and no RoPE scaling.
JetBrains 2026.
"""

from __future__ import annotations

from vkbackend.models.architectures import qwen3moe
from vkbackend.models.architectures.config import Config, with_windows
from vkbackend.models.architectures.reading import read_float, read_windowed
from vkbackend.models.gguf.reader import GGUF
from vkbackend.rope import RopeTable

PERIOD = 4


class Model(qwen3moe.Model):
    windows = True

    def read_config(self, gguf: GGUF) -> Config:
        c = super().read_config(gguf)
        window = int(gguf.u32("mellum.attention.sliding_window", 0))
        local = read_windowed(gguf, len(c.layers), PERIOD)
        return with_windows(c, window, local, "rope_swa") if window else c

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        tables = super().read_ropes(gguf)
        table = tables["rope"]
        base = read_float(gguf, "rope.freq_base_swa", table.freq_base)
        return tables | {"rope_swa": RopeTable(table.n_rot, base)}
