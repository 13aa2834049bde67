"""olmo (OLMo 1): llama with layer norms that have no weights, and in some models a limit of q, k and v.
Groeneveld et al. 2024, arXiv:2402.00838.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vkbackend.models.architectures.layer_normed import LayerNormed
from vkbackend.models.architectures.weight_specs import WeightSpec


class Model(LayerNormed):
    clamps = True
    half_split = False

    def norm_weights(self, specs: list[WeightSpec], prefix: str) -> list[WeightSpec]:
        ones = np.ones(self.config.n_embd, np.float32)
        return [replace(spec, values=ones) if "_norm" in spec.name else spec for spec in specs]
