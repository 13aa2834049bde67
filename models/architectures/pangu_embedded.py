"""pangu-embedded (openPangu-Embedded 1B, 7B): qwen2 with a bias of the output projection. Chen et al. 2025,
arXiv:2505.22375.
"""

from __future__ import annotations

from vkbackend.models.architectures.decoder import Decoder


class Model(Decoder):
    freq_factors = True
