"""qwen35 (dense Qwen3.5 and 3.6): as qwen3next, but the value heads that read one key head are n_k heads
apart, beta and alpha are separate tensors, RoPE has interleaved sections (Bai et al. 2025, arXiv:2511.21631),
and a dense feed-forward network stands in place of the experts.
"""

from __future__ import annotations

from vkbackend.models.architectures import qwen3next
from vkbackend.models.architectures.mixture import Mixture


class Model(qwen3next.Model):
    mixture: Mixture | None = None
    tiled = True
    interleaved_sections = True
