"""phi2 (Phi-1, Phi-1.5, Phi-2): layer norms, attention and FFN in parallel, RoPE on a part of each head, and
biases everywhere, also of the logits. Li et al. 2023, arXiv:2309.05463.
"""

from __future__ import annotations

from vkbackend.meta.plan import rows
from vkbackend.models.architectures.layer_normed import LayerNormed
from vkbackend.models.architectures.weight_specs import WeightSpec


class Model(LayerNormed):
    parallel = True
    gated = False

    def outer_weights(self) -> list[WeightSpec]:
        return [*super().outer_weights(), WeightSpec("output.bias", (self.config.n_vocab,), rows("vocab"))]
