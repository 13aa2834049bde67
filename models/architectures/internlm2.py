"""internlm2 (InternLM 2 and 2.5): llama without frequency factors. Cai et al. 2024, arXiv:2403.17297."""

from __future__ import annotations

from vkbackend.models.architectures.decoder import Decoder


class Model(Decoder):
    half_split = False
