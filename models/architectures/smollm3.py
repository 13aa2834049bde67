"""smollm3 (SmolLM3): llama without RoPE in every fourth layer (NoPE; Yang et al. 2025, arXiv:2501.18795)."""

from __future__ import annotations

from vkbackend.models.architectures.decoder import Decoder

PERIOD = 4


class Model(Decoder):
    half_split = False

    def has_rope(self, il: int) -> bool:
        return il % PERIOD != PERIOD - 1
