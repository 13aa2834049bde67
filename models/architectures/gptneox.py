"""gptneox (GPT-NeoX, Pythia): layer norms, RoPE on a part of each head, and GELU with the error function. In
most models, attention and FFN are in parallel and have separate norms. Black et al. 2022, arXiv:2204.06745;
Biderman et al. 2023, arXiv:2304.01373.
"""

from __future__ import annotations

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.layer_normed import LayerNormed
from vkbackend.models.gguf.reader import GGUF


class Model(LayerNormed):
    norms_apart = True
    gated = False

    def read_config(self, gguf: GGUF) -> Config:
        self.parallel = gguf.boolean("gptneox.use_parallel_residual", True)
        return super().read_config(gguf)

    def activate_alone(self, x: Tensor, il: int) -> Tensor:
        return ops.gelu_erf(x)
