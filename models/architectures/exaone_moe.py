"""exaone-moe (K-EXAONE): dots1, but three of four layers have a sliding window and RoPE, and the fourth has
neither. LG AI Research 2026, arXiv:2601.01739.
"""

from __future__ import annotations

from vkbackend.models.architectures import dots1
from vkbackend.models.architectures.config import Config, with_windows
from vkbackend.models.architectures.reading import read_count, read_windowed
from vkbackend.models.gguf.reader import GGUF

PERIOD = 4


class Model(dots1.Model):
    windows = True
    freq_factors = True

    def read_config(self, gguf: GGUF) -> Config:
        c = super().read_config(gguf)
        self.local = read_windowed(gguf, len(c.layers), PERIOD)
        return with_windows(c, read_count(gguf, "attention.sliding_window"), self.local)

    def has_rope(self, il: int) -> bool:
        return self.local[il]
