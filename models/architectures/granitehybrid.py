"""granitehybrid (Granite 4 hybrid): granite, but layers without kv heads are Mamba-2 layers. Layers have a
dense FFN, or experts and a shared expert. Most files switch RoPE off. Granite team 2025, "Granite 4.0".
"""

from __future__ import annotations

from vkbackend.models.architectures import granite
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import ROPE_FACTORS
from vkbackend.models.architectures.state_space import Scan, StateSpaceDecoder
from vkbackend.models.gguf.reader import GGUF
from vkbackend.rope import RopeTable


class Model(granite.Model, StateSpaceDecoder):
    mixture = Mixture()
    freq_factors = True

    def read_config(self, gguf: GGUF) -> Config:
        self.read_multipliers(gguf)
        self.scan = Scan.from_gguf(gguf)
        config = Config.from_gguf(gguf, self.mixture, low=0)
        self.recurrent = [not layer.n_head_kv for layer in config.layers]
        self.everywhere = gguf.boolean(f"{gguf.architecture}.rope.scaling.finetuned", False)
        return config

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        return super().read_ropes(gguf) if self.everywhere else {}

    def unread(self) -> set[str]:
        return super().unread() | (set() if self.everywhere else set(ROPE_FACTORS))

    def has_rope(self, il: int) -> bool:
        return self.everywhere
