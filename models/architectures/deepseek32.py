"""deepseek32 (DeepSeek V3.2): deepseek2 with an indexer in every layer (indexed.py). The indexer's RoPE is
half-split. DeepSeek-AI 2025, arXiv:2512.02556.
"""

from __future__ import annotations

from vkbackend.models.architectures.indexed import IndexedAttention


class Model(IndexedAttention):
    index_half_split = True
