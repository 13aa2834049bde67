"""mamba2 (Mamba-2, Mamba-Codestral): state space layers only (Dao and Gu 2024, arXiv:2405.21060)."""

from __future__ import annotations

from collections.abc import Mapping

from vkbackend.meta.policy import Layer
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.mixers_alone import MixersAlone
from vkbackend.models.architectures.state_space import Scan, StateSpaceDecoder
from vkbackend.models.gguf.reader import GGUF


class Model(MixersAlone, StateSpaceDecoder):
    def read_config(self, gguf: GGUF) -> Config:
        self.scan = Scan.from_gguf(gguf)
        return super().read_config(gguf)

    def layer(self, il: int, types: Mapping[str, str]) -> Layer:
        return Layer(self.scan_mixer(il, types), None, "recurrent")
