"""bailingmoe2 (Ling 2, Ring 2): norms of q and k heads, RoPE on a part of each head, and experts in
groups with a shared expert in all but the first layers. Routing is DeepSeek-V3's (arXiv:2412.19437). Ling
team 2025, arXiv:2510.22115.
"""

from __future__ import annotations

from vkbackend.models.architectures import qwen3
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.ops.moe import Gating


class Model(qwen3.Model):
    mixture: Mixture | None = Mixture(gating=Gating("sigmoid", norm_w=False))
