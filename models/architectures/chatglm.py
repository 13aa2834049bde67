"""chatglm (ChatGLM 2 and 3, GLM-4-9B): llama with RoPE on half of each head, biases of q, k and v, and one
tensor for gate and up. Zeng et al. 2023, arXiv:2210.02414; GLM team 2024, arXiv:2406.12793.
"""

from __future__ import annotations

from vkbackend.models.architectures.decoder import Decoder


class Model(Decoder):
    half_split = False
