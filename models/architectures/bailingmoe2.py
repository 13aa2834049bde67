"""bailingmoe2 (Ling 2, Ring 2): the heads of q and k have norms, and RoPE rotates a part of each head. All
but the first layers have experts in groups, and a shared expert. Routing is DeepSeek-V3's (arXiv:2412.19437).
Ling team 2025, arXiv:2510.22115.
"""

from __future__ import annotations

from vkbackend.models.architectures import qwen3
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.ops.moe import Gating


class Model(qwen3.Model):
    mixture: Mixture | None = Mixture(gating=Gating("sigmoid", norm_w=False))
