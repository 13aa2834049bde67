"""qwen3vl (the text model of Qwen3-VL): qwen3 with interleaved RoPE sections. For text, all sections have the
same position. Bai et al. 2025, arXiv:2511.21631.
"""

from __future__ import annotations

from vkbackend.models.architectures import qwen3


class Model(qwen3.Model):
    interleaved_sections = True
