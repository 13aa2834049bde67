"""cohere2 (Command R7B, Command A): command-r, but three of four layers have a sliding window and RoPE, and
the fourth has neither. Cohere 2025, arXiv:2504.00698.
"""

from __future__ import annotations

from vkbackend.models.architectures import command_r
from vkbackend.models.architectures.config import Config, with_windows
from vkbackend.models.architectures.reading import read_windowed
from vkbackend.models.gguf.reader import GGUF

PERIOD = 4


class Model(command_r.Model):
    windows = True

    def read_config(self, gguf: GGUF) -> Config:
        c = super().read_config(gguf)
        self.local = read_windowed(gguf, len(c.layers), PERIOD)
        return with_windows(c, int(gguf.u32("cohere2.attention.sliding_window", 0)), self.local)

    def has_rope(self, il: int) -> bool:
        return self.local[il]
