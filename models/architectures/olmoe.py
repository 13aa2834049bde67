"""olmoe (OLMoE-1B-7B): norms of q and k over all heads, and experts in every layer. The router chooses
experts by softmax and does not normalise their weights. Muennighoff et al. 2024, arXiv:2409.02060.
"""

from __future__ import annotations

from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.wide_normed import WideNormed
from vkbackend.ops.moe import Gating


class Model(WideNormed):
    mixture = Mixture(gating=Gating(norm_w=False))
