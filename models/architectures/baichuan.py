"""baichuan (Baichuan 7B, Baichuan 2 7B): llama without frequency factors. Yang et al. 2023,
arXiv:2309.10305.
"""

from __future__ import annotations

from vkbackend.errors import UnsupportedModel
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.reading import read_n_layer
from vkbackend.models.gguf.reader import GGUF

LAYERS_OF_13B = 40  # Files do not state whether they need ALiBi.


class Model(Decoder):
    half_split = False

    def read_config(self, gguf: GGUF) -> Config:
        if read_n_layer(gguf) == LAYERS_OF_13B:
            raise UnsupportedModel(
                f"{gguf.paths[0]}: Baichuan 13B is not supported, because it needs ALiBi; Baichuan 7B is"
            )
        return super().read_config(gguf)
