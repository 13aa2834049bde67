"""qwen2 (Qwen2, Qwen2.5): as llama, but RoPE pairs element i of a head with i + head_dim / 2, and q, k and v
have biases. Yang et al. 2024, arXiv:2407.10671.
"""

from __future__ import annotations

from vkbackend.models.architectures.decoder import Decoder


class Model(Decoder):
    pass
