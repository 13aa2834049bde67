"""ernie4_5-moe (ERNIE 4.5 with experts): ernie4_5 with experts and an optional shared expert in all but the
first layers, or in every n-th layer. A softmax plus a bias chooses experts; the normalised softmax weighs
them.
"""

from __future__ import annotations

from dataclasses import replace

from vkbackend.models.architectures import ernie4_5
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import read_count
from vkbackend.models.gguf.reader import GGUF


class Model(ernie4_5.Model):
    mixture = Mixture()

    def read_config(self, gguf: GGUF) -> Config:
        c, step = super().read_config(gguf), read_count(gguf, "interleave_moe_layer_step", 1)
        if step == 1:
            return c
        n_ff = read_count(gguf, "feed_forward_length")
        layers = [
            replace(layer, n_ff=n_ff, mixture=layer.mixture if (il + 1) % step == 0 else None)
            for il, layer in enumerate(c.layers)
        ]
        return replace(c, layers=tuple(layers))
