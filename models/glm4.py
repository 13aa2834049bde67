"""glm4 (GLM-4): as llama with RoPE on the first half of each head, one tensor for gate and up, and norms of
what attention and FFN give before it is added. GLM team 2024, arXiv:2406.12793.
"""

from __future__ import annotations

from vkbackend.models.base import check_off
from vkbackend.models.decoder import Decoder
from vkbackend.models.gguf import GGUF


class Model(Decoder):
    """The weights and the graph."""

    half_split = False
    post_norms = True

    def __init__(self, gguf: GGUF) -> None:
        check_off(gguf, "rope.dimension_sections")
        super().__init__(gguf)
