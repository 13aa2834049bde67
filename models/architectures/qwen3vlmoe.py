"""qwen3vlmoe (the text models of Qwen3-VL-30B-A3B and 235B-A22B): qwen3moe with interleaved RoPE sections.
Bai et al. 2025, arXiv:2511.21631.
"""

from __future__ import annotations

from vkbackend.models.architectures import qwen3moe


class Model(qwen3moe.Model):
    interleaved_sections = True
