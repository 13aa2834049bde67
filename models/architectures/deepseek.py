"""deepseek (DeepSeekMoE 16B): llama with experts and shared experts in all but the first layers. The router
chooses experts by softmax and does not normalise their weights. Dai et al. 2024, arXiv:2401.06066.
"""

from __future__ import annotations

from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.ops.moe import Gating


class Model(Decoder):
    half_split = False
    mixture = Mixture(gating=Gating(norm_w=False))
