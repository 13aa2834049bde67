"""baichuan (Baichuan 1 and 2): llama; the models of 13B have ALiBi instead of RoPE. Yang et al. 2023,
arXiv:2309.10305. Files do not state which of the two applies. Only 13B has 40 layers, so the number of layers
decides.
"""

from __future__ import annotations

from vkbackend.models.architectures.alibi import Alibi
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.reading import read_n_layer
from vkbackend.models.gguf.reader import GGUF

LAYERS_OF_13B = 40


class Model(Alibi):
    half_split = False

    def read_config(self, gguf: GGUF) -> Config:
        self.default_max_bias = 8.0 if read_n_layer(gguf) == LAYERS_OF_13B else 0.0
        return super().read_config(gguf)
