"""qwen3vl (Qwen3-VL, its text part): qwen3 with interleaved RoPE sections. In text the position is the same
in all sections. Bai et al. 2025, arXiv:2511.21631.
"""

from __future__ import annotations

from vkbackend.models.architectures import qwen3


class Model(qwen3.Model):
    interleaved_sections = True
