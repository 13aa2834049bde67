"""codeshell (CodeShell): starcoder2 with one tensor for q, k and v. Xie et al. 2024, arXiv:2403.15747."""

from __future__ import annotations

from vkbackend.models.architectures.layer_normed import LayerNormed


class Model(LayerNormed):
    gated = False
