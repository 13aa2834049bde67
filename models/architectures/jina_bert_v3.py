"""jina-bert-v3 (jina-embeddings-v3): encoder.py with RoPE, without the task-specific LoRA adapters. Sturua et
al. 2024, arXiv:2409.10173.
"""

from __future__ import annotations

from vkbackend.models.architectures.encoder import Encoder


class Model(Encoder):
    pass
