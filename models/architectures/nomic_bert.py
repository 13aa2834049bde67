"""nomic-bert (nomic-embed-text 1 and 1.5): encoder.py with RoPE and a gated FFN. Nussbaum et al. 2024,
arXiv:2402.01613.
"""

from __future__ import annotations

from vkbackend.models.architectures.encoder import Encoder


class Model(Encoder):
    gated = True
