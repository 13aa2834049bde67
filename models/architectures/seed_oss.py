"""seed_oss (Seed-OSS): as qwen2, with its biases of q, k and v; the FFN's norm has another name in files.
ByteDance Seed team 2025.
"""

from __future__ import annotations

from vkbackend.models.architectures.decoder import Decoder


class Model(Decoder):
    pre_ffn_norm = "post_attention_norm"
