"""qwen2moe (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): qwen2 with experts and a shared expert in every layer. The
router chooses experts by softmax and does not normalise their weights. One sigmoid per token scales the
shared expert's result. Qwen team 2024, arXiv:2407.10671.
"""

from __future__ import annotations

from dataclasses import replace

from vkbackend.models.architectures import qwen2
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import read_count
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import Gating

MIXTURE = Mixture(gating=Gating(norm_w=False))


class Model(qwen2.Model):
    mixture = MIXTURE

    def read_config(self, gguf: GGUF) -> Config:
        for key in ("expert_count", "expert_feed_forward_length"):
            read_count(gguf, key)  # Optional in `read_mixtures`.
        # Some files state the shared expert's width only as the dense FFN's width.
        n_shared = read_count(gguf, "feed_forward_length")
        return Config.from_gguf(gguf, replace(MIXTURE, n_shared=n_shared))
