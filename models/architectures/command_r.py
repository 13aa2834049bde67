"""command-r (Command R, and Command R+ if the file has no norms of q and k): attention and FFN read the same
layer norm, and their results are added. Cohere 2024.
"""

from __future__ import annotations

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.layer_normed import LayerNormed
from vkbackend.models.architectures.reading import read_float
from vkbackend.models.gguf.reader import GGUF


class Model(LayerNormed):
    parallel = True
    half_split = False

    def read_config(self, gguf: GGUF) -> Config:
        self.logit_scale = read_float(gguf, "logit_scale", 1.0)
        return super().read_config(gguf)

    def scaled(self, x: Tensor) -> Tensor:
        return ops.scale(x, self.logit_scale)
