"""hy_v3 (Hunyuan 3): bailingmoe2 with RoPE on whole heads. Layers without a dense FFN in the file have
experts. Tencent 2026.
"""

from __future__ import annotations

from vkbackend.models.architectures import bailingmoe2
from vkbackend.models.architectures.config import Config, dense_if_stored
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import Gating


class Model(bailingmoe2.Model):
    mixture = Mixture(gating=Gating("sigmoid"))

    def read_config(self, gguf: GGUF) -> Config:
        return dense_if_stored(super().read_config(gguf), gguf)

    def expert_weights(self, il: int) -> list[WeightSpec]:
        specs, stored, layer = super().expert_weights(il), f"blk.{il}.exp_probs_b", self.config.layers[il]
        if stored not in self._shapes or not layer.mixture:
            return specs
        return [*specs, WeightSpec("exp_probs_b.bias", (layer.mixture.n_expert,), source=stored)]
