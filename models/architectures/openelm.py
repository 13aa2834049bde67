"""openelm (OpenELM): qwen3 in which the number of heads and the width of the FFN grow from layer to layer.
Mehta et al. 2024, arXiv:2404.14619.
"""

from __future__ import annotations

from vkbackend.models.architectures import qwen3


class Model(qwen3.Model):
    pass
