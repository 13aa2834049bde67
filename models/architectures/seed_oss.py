"""seed_oss (Seed-OSS): qwen2 with another name for the FFN's norm. ByteDance Seed team 2025."""

from __future__ import annotations

from vkbackend.models.architectures.decoder import Decoder


class Model(Decoder):
    pre_ffn_norm = "post_attention_norm"
