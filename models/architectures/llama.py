"""llama (Llama 1 to 3, Mistral, Mixtral, SmolLM): decoder.py with RoPE on adjacent pairs and, in Llama 3.1,
frequency factors. In models with experts `n_ff` is the width of one expert. Touvron et al. 2023,
arXiv:2302.13971; Jiang et al. 2024, arXiv:2401.04088.
"""

from __future__ import annotations

from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.mixture import Mixture


class Model(Decoder):
    mixture: Mixture | None = Mixture()
    freq_factors = True
    half_split = False
