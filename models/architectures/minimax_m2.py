"""minimax-m2 (MiniMax-M2): norms of q and k over all heads, RoPE on a part of each head, and experts in every
layer. A sigmoid plus a bias chooses experts; the normalised sigmoid weighs them. MiniMax 2025,
arXiv:2506.13585.
"""

from __future__ import annotations

from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.wide_normed import WideNormed
from vkbackend.ops.moe import Gating


class Model(WideNormed):
    mixture = Mixture(gating=Gating("sigmoid"))
