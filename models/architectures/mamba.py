"""mamba (Mamba-1): selective state space layers only (Gu and Dao 2023, arXiv:2312.00752). Falcon Mamba
divides dt, B and C by their RMS (Zuo et al. 2024, arXiv:2410.05355)."""

from __future__ import annotations

from collections.abc import Mapping

from vkbackend.meta.policy import Layer
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.mixers_alone import MixersAlone
from vkbackend.models.architectures.selective import Selection, SelectiveDecoder
from vkbackend.models.gguf.reader import GGUF


class Model(MixersAlone, SelectiveDecoder):
    def read_config(self, gguf: GGUF) -> Config:
        self.selection = Selection.from_gguf(gguf)
        return super().read_config(gguf)

    def layer(self, il: int, types: Mapping[str, str]) -> Layer:
        return Layer(self.channels(il, types), None, "recurrent")
