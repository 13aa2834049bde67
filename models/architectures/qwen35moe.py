"""qwen35moe (Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B): qwen35 with qwen3next's experts."""

from __future__ import annotations

from vkbackend.models.architectures import qwen3next


class Model(qwen3next.Model):
    tiled = True
    interleaved_sections = True
