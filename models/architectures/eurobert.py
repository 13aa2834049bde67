"""eurobert (EuroBERT, jina-embeddings-v5): decoder.py, in which every token attends to all others. Boizard et
al. 2025, arXiv:2503.05500.
"""

from __future__ import annotations

from vkbackend.models.architectures.decoder import Decoder


class Model(Decoder):
    causal = False
