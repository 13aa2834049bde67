"""starcoder2 (StarCoder 2): decoder.py with layer norms and biases in all layers. The FFN has no gate, and
its activation is GELU. Lozhkov et al. 2024, arXiv:2402.19173.
"""

from __future__ import annotations

from vkbackend.models.architectures.layer_normed import LayerNormed


class Model(LayerNormed):
    gated = False
