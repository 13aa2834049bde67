"""minicpm (MiniCPM 1, 2 and 4): granite with RoPE factors for short and for long contexts. Old files lack
the factors of embeddings, residuals and logits. Hu et al. 2024, arXiv:2404.06395.
"""

from __future__ import annotations

import math

from vkbackend.models.architectures import granite
from vkbackend.models.architectures.reading import read_count, read_float, read_n_layer
from vkbackend.models.gguf.reader import GGUF

BASE_WIDTH = 256  # the width at which logits are not divided


def read_multipliers(model: granite.Model, gguf: GGUF) -> None:
    width, n_layer = read_count(gguf, "embedding_length"), read_n_layer(gguf)
    model.embedding_scale = read_float(gguf, "embedding_scale", 12.0)
    model.residual_scale = read_float(gguf, "residual_scale", 1.4 / math.sqrt(n_layer))
    model.logit_scale = read_float(gguf, "logit_scale", width / BASE_WIDTH)


class Model(granite.Model):
    freq_factors = True

    def read_multipliers(self, gguf: GGUF) -> None:
        read_multipliers(self, gguf)
