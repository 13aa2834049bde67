"""seed_oss (Seed-OSS): as qwen2, biases of q, k and v included, with other names of its norms. ByteDance Seed
team 2025.
"""

from __future__ import annotations

from vkbackend.models.architectures.decoder import Decoder


class Model(Decoder):
    """The weights and the graph."""

    pre_ffn_norm = "post_attention_norm"
