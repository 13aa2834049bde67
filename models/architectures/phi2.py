"""phi2 (Phi-1, Phi-1.5, Phi-2): layer norms, attention and FFN in parallel, RoPE on a part of each head, and
biases everywhere, also of the logits. Li et al. 2023, arXiv:2309.05463.
"""

from __future__ import annotations

from vkbackend.models.architectures.layer_normed import LayerNormed


class Model(LayerNormed):
    parallel = True
    gated = False
