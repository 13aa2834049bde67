"""nemotron_h_moe (Nemotron 3 Nano): nemotron_h with experts and a shared expert, without gates, instead of
FFNs. A sigmoid plus a bias chooses experts; the sigmoid alone weighs them. NVIDIA 2025, arXiv:2512.20848.
"""

from __future__ import annotations

from vkbackend.models.architectures import nemotron_h
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import check_off
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import Gating


class Model(nemotron_h.Model):
    mixture: Mixture | None = Mixture(gating=Gating("sigmoid"), act="relu2_alone")

    def read_config(self, gguf: GGUF) -> Config:
        check_off(gguf, "moe_latent_size")  # Nemotron 3 Super: experts read a latent vector
        return super().read_config(gguf)
