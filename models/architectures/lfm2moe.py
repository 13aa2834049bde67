"""lfm2moe (LFM2 with experts): lfm2 with experts in all but the first layers. A sigmoid plus a bias chooses
experts; the normalised sigmoid weighs them. Liquid AI 2025, arXiv:2511.23404.
"""

from __future__ import annotations

from vkbackend.models.architectures import lfm2
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.ops.moe import Gating


class Model(lfm2.Model):
    mixture = Mixture(gating=Gating("sigmoid"))
