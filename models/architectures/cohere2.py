"""cohere2 (Command R7B, Command A): one layer norm for attention and FFN, which are added together; of every
four layers three see a window and turn q and k, the fourth sees all and does not. Cohere 2025,
arXiv:2504.00698.
"""

from __future__ import annotations

from dataclasses import replace

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, read_float, read_windowed
from vkbackend.models.architectures.decoder import Config
from vkbackend.models.architectures.layer_normed import LayerNormed
from vkbackend.models.gguf.reader import GGUF

PERIOD = 4


class Model(LayerNormed):
    """The weights and the graph."""

    parallel = True
    windows = True
    half_split = False

    def read_config(self, gguf: GGUF) -> Config:
        c = super().read_config(gguf)
        self.logit_scale = read_float(gguf, "logit_scale", 1.0)
        window = int(gguf.u32("cohere2.attention.sliding_window", 0))
        self.local = read_windowed(gguf, len(c.layers), PERIOD)
        layers = [
            replace(layer, window=window if local else 0)
            for layer, local in zip(c.layers, self.local, strict=True)
        ]
        return replace(c, layers=tuple(layers))

    def rotate(self, x: Tensor, w: Weights, name: str, il: int) -> Tensor:
        return super().rotate(x, w, name, il) if self.local[il] else x

    def normed_outputs(self, h: Tensor, w: Weights) -> Tensor:
        return ops.scale(super().normed_outputs(h, w), self.logit_scale)
