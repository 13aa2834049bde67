"""bailingmoe (Ling-lite, Ling-plus): deepseek with experts in every layer. The file says whether the router
normalises the experts' weights. Ling team 2025, arXiv:2503.05139.
"""

from __future__ import annotations

from vkbackend.models.architectures import deepseek


class Model(deepseek.Model):
    pass
