"""qwen2vl (the text models of Qwen2-VL and Qwen2.5-VL): qwen2 with RoPE sections, which are contiguous. For
text, all sections have the same position. Wang et al. 2024, arXiv:2409.12191; Bai et al. 2025,
arXiv:2502.13923.
"""

from __future__ import annotations

from vkbackend.models.architectures import qwen2


class Model(qwen2.Model):
    pass
