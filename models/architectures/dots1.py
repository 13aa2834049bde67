"""dots1 (dots.llm1): qwen3 with dense layers, then experts with a shared expert, chosen by sigmoid plus a
bias that does not enter the weights. rednote-hilab 2025, arXiv:2506.05767.
"""

from __future__ import annotations

from vkbackend.models.architectures import qwen3
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.ops.moe import Gating


class Model(qwen3.Model):
    mixture = Mixture(gating=Gating("sigmoid", norm_w=False))
