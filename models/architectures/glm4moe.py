"""glm4moe (GLM-4.5, GLM-4.5-Air): attention with biases, optional norms of q and k heads, and RoPE on a part
of each head. All but the first layers have experts and a shared expert. Routing and
the multi-token prediction head are DeepSeek-V3's (arXiv:2412.19437). GLM-4.5 team 2025, arXiv:2508.06471.
"""

from __future__ import annotations

from vkbackend.models.architectures.ahead import PredictsAhead
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.ops.moe import Gating


class Model(PredictsAhead):
    mixture = Mixture(gating=Gating("sigmoid", norm_w=False))
    pre_ffn_norm = "post_attention_norm"

    def attention_weights(self, il: int) -> list[WeightSpec]:
        norms = [s for s in self.head_norm_weights(il) if f"blk.{il}.{s.name}.weight" in self._shapes]
        return [*super().attention_weights(il), *norms]
