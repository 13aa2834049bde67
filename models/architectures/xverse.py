"""xverse (XVERSE 7B, 13B, 65B): llama without experts or frequency factors. XVERSE Technology 2023."""

from __future__ import annotations

from vkbackend.models.architectures.decoder import Decoder


class Model(Decoder):
    half_split = False
