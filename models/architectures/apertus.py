"""apertus (Apertus): qwen3 with RoPE's frequency factors. The FFN has no gate, and its activation is xIELU
(Huang and Schlag 2024, arXiv:2411.13010). Swiss AI 2025, arXiv:2509.14233.
"""

from __future__ import annotations

import math

from vkbackend.errors import GGUFError
from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures import qwen3
from vkbackend.models.gguf.reader import GGUF

PARAMETERS = ("alpha_p", "alpha_n", "beta", "eps")  # The model applies softplus to the file's alphas.


class Model(qwen3.Model):
    freq_factors = True
    gated = False

    def __init__(self, gguf: GGUF) -> None:
        super().__init__(gguf)
        read = [_read(gguf, f"xielu.{name}", self.n_layer) for name in PARAMETERS]
        self.curves = [
            (_softplus(alpha_p), beta + _softplus(alpha_n), beta, eps)
            for alpha_p, alpha_n, beta, eps in zip(*read, strict=True)
        ]

    def activate_alone(self, x: Tensor, il: int) -> Tensor:
        return ops.xielu(x, *self.curves[il])


def _read(gguf: GGUF, name: str, n_layer: int) -> list[float]:
    if name not in gguf.metadata or not gguf.metadata.kind(name)[1]:
        values = [float(gguf.f32(name))] * n_layer
    else:
        values = [float(value) for value in gguf.floats(name)]
    if len(values) < n_layer or not all(map(math.isfinite, values)):
        raise GGUFError(f"{gguf.paths[0]}: {name} is {values[:8]}, expected {n_layer} finite numbers")
    return values[:n_layer]


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
