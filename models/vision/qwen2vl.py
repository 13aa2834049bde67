"""qwen2vl_merger (Qwen2-VL): qwen_vl.py with layer norms and quick GELU.

Wang et al. 2024, arXiv:2409.12191.
"""

from __future__ import annotations

from vkbackend.models.vision.qwen_vl import QwenVL


class Model(QwenVL):
    text_architectures = ("qwen2vl",)
