"""dots1 (dots.llm1): qwen3 with experts and a shared expert in all but the first layers. A sigmoid plus a
bias chooses experts; the sigmoid alone weighs them. Rednote-hilab 2025, arXiv:2506.05767.
"""

from __future__ import annotations

from vkbackend.models.architectures import qwen3
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.ops.moe import Gating


class Model(qwen3.Model):
    mixture = Mixture(gating=Gating("sigmoid", norm_w=False))
