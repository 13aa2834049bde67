"""gemma-embedding (EmbeddingGemma): gemma3, in which every token attends to all others, or to a window on
both sides. Vera et al. 2025, arXiv:2509.20354.
"""

from __future__ import annotations

from vkbackend.models.architectures import gemma3


class Model(gemma3.Model):
    causal = False
