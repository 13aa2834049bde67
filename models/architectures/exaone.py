"""exaone (EXAONE 3, 3.5 and Deep): llama with half-split RoPE. LG AI Research 2024, arXiv:2408.03541;
arXiv:2412.04862.
"""

from __future__ import annotations

from vkbackend.models.architectures.decoder import Decoder


class Model(Decoder):
    freq_factors = True
