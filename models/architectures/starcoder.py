"""starcoder (StarCoder 1, SantaCoder): gpt2 with one kv head. Li et al. 2023, arXiv:2305.06161."""

from __future__ import annotations

from vkbackend.models.architectures import gpt2


class Model(gpt2.Model):
    pass
