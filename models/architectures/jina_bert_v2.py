"""jina-bert-v2 (jina-embeddings-v2): encoder.py with ALiBi and a gated FFN. Günther et al. 2023,
arXiv:2310.19923; Press et al. 2022, arXiv:2108.12409.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from vkbackend.errors import UnsupportedModel
from vkbackend.meta import ops
from vkbackend.meta.plan import rows
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.encoder import Encoder
from vkbackend.models.architectures.reading import read_float
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.rope import RopeTable


class Model(Encoder):
    gated = True

    def __init__(self, gguf: GGUF) -> None:
        super().__init__(gguf)
        for name in ("attn_q_norm", "attn_k_norm", "attn_norm_2"):
            if f"blk.0.{name}.weight" in gguf.tensors:
                raise UnsupportedModel(
                    f"{gguf.paths[0]}: {name} (jina-embeddings-v2-base-code) is not supported; the other "
                    "models of jina-embeddings-v2 are"
                )
        self.max_bias = read_float(gguf, "attention.max_alibi_bias", 8.0, low=0.0)

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        return {}

    def ropes(self, n_ctx: int) -> dict[str, RopeTable]:
        return {}

    def has_rope(self, il: int) -> bool:
        return False

    def attention_weights(self, il: int) -> list[WeightSpec]:
        n_head = self.config.layers[il].n_head
        slopes = np.array([*slopes_of(n_head, self.max_bias)], np.float32)
        return [
            *super().attention_weights(il),
            WeightSpec("attn_slopes", (n_head,), rows("heads"), values=slopes),
        ]

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return ops.gelu_mul(gate, up)


def slopes_of(n_head: int, max_bias: float) -> Iterator[float]:
    """Yield ALiBi's slope of each head. The slope is 2^(-max_bias i / n) for i = 1..n, where n is the largest
    power of two up to `n_head`, and 2^(-max_bias i / (2n)) for i = 1, 3, 5, ... for the other heads."""
    n = 1 << int(math.log2(n_head))
    for i in range(n_head):
        exponent = i + 1 if i < n else (2 * (i - n) + 1) / 2
        yield 2.0 ** (-max_bias * exponent / n)
