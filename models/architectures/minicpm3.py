"""minicpm3 (MiniCPM3-4B): latent attention with a key and a value per head (latent.py), and minicpm's factors
of embeddings, residuals and logits. Hu et al. 2024, arXiv:2404.06395.
"""

from __future__ import annotations

from vkbackend.models.architectures import granite
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.latent import LatentAttention
from vkbackend.models.architectures.minicpm import read_multipliers
from vkbackend.models.gguf.reader import GGUF


class Model(granite.Model, LatentAttention):
    freq_factors = True
    half_split = True

    def read_config(self, gguf: GGUF) -> Config:
        return self.read_latent(gguf, super().read_config(gguf))

    def read_multipliers(self, gguf: GGUF) -> None:
        read_multipliers(self, gguf)
