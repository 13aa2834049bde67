"""Attention with linear biases (ALiBi): a head adds -slope * distance to its scores. Press et al. 2022,
arXiv:2108.12409.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from vkbackend.meta.plan import rows
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.reading import read_float
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.rope import RopeTable


class Alibi(Decoder):
    """A decoder with ALiBi instead of RoPE if `max_bias` is above 0. `default_max_bias` applies to files
    without attention.max_alibi_bias."""

    default_max_bias = 8.0
    max_bias = 0.0

    def read_config(self, gguf: GGUF) -> Config:
        config = super().read_config(gguf)
        self.max_bias = read_float(gguf, "attention.max_alibi_bias", self.default_max_bias, low=0.0)
        return config

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        return {} if self.max_bias else super().read_ropes(gguf)

    def has_rope(self, il: int) -> bool:
        return not self.max_bias

    def attention_weights(self, il: int) -> list[WeightSpec]:
        specs, n_head = super().attention_weights(il), self.config.layers[il].n_head
        if not self.max_bias:
            return specs
        slopes = np.array([*slopes_of(n_head, self.max_bias)], np.float32)
        return [*specs, WeightSpec("attn_slopes", (n_head,), rows("heads"), values=slopes)]


def slopes_of(n_head: int, max_bias: float) -> Iterator[float]:
    """Yield ALiBi's slope of each head. The slope is 2^(-max_bias i / n) for i = 1..n, where n is the largest
    power of two up to `n_head`, and 2^(-max_bias i / (2n)) for i = 1, 3, 5, ... for the other heads."""
    n = 1 << int(math.log2(n_head))
    for i in range(n_head):
        exponent = i + 1 if i < n else (2 * (i - n) + 1) / 2
        yield 2.0 ** (-max_bias * exponent / n)
