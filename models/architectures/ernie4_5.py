"""ernie4_5 (dense ERNIE 4.5): llama with optional biases. Baidu 2025, ERNIE 4.5 Technical Report."""

from __future__ import annotations

from vkbackend.models.architectures.decoder import Decoder


class Model(Decoder):
    half_split = False
