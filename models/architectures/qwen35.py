"""qwen35 (dense Qwen3.5 and 3.6): qwen3next with a dense FFN, separate tensors for beta and alpha, and
interleaved RoPE sections (Bai et al. 2025, arXiv:2511.21631).
"""

from __future__ import annotations

from vkbackend.models.architectures import qwen3next
from vkbackend.models.architectures.mixture import Mixture


class Model(qwen3next.Model):
    mixture: Mixture | None = None
    tiled = True
    interleaved_sections = True
