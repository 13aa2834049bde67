"""qwen2 (Qwen2, Qwen2.5): llama with half-split RoPE and biases of q, k and v. Yang et al. 2024,
arXiv:2407.10671.
"""

from __future__ import annotations

from vkbackend.models.architectures.decoder import Decoder


class Model(Decoder):
    pass
