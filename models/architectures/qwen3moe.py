"""qwen3moe (Qwen3-30B-A3B, Qwen3-235B-A22B): qwen3 with experts in every layer. The router chooses experts by
softmax and normalises their weights. Yang et al. 2025, arXiv:2505.09388.
"""

from __future__ import annotations

from vkbackend.models.architectures import qwen3
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import read_count
from vkbackend.models.gguf.reader import GGUF


class Model(qwen3.Model):
    mixture = Mixture()

    def __init__(self, gguf: GGUF) -> None:
        for key in ("expert_count", "expert_feed_forward_length"):
            read_count(gguf, key)  # Optional in `read_mixtures`.
        super().__init__(gguf)
