"""bailingmoe2 (Ling 2, Ring 2): norms of q and k heads, RoPE on a part of each head, and experts in groups with
a shared expert in all but the first layers. Routing and the multi-token prediction head are DeepSeek-V3's
(arXiv:2412.19437). Ling team 2025, arXiv:2510.22115.
"""

from __future__ import annotations

from dataclasses import replace

from vkbackend.models.architectures.ahead import PredictsAhead
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.ops.moe import Gating


class Model(PredictsAhead):
    mixture: Mixture | None = Mixture(gating=Gating("sigmoid", norm_w=False))

    def attention_weights(self, il: int) -> list[WeightSpec]:
        return [*super().attention_weights(il), *self.head_norm_weights(il)]

    def ahead_weights(self, il: int) -> list[WeightSpec]:
        """Name the head's last norm as files of this family do."""
        last = f"blk.{il}.layer_output_norm.weight"
        return [
            replace(spec, source=last) if "shared_head_norm" in spec.name and last in self._shapes else spec
            for spec in super().ahead_weights(il)
        ]
