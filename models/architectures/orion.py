"""orion (Orion-14B): decoder.py with layer norms and their biases. Chen et al. 2024, arXiv:2401.12246."""

from __future__ import annotations

from vkbackend.models.architectures.layer_normed import LayerNormed


class Model(LayerNormed):
    pass
