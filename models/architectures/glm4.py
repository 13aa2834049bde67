"""glm4 (GLM-4): llama with RoPE on the first n_rot dimensions of each head, one tensor for gate and up, and
norms after attention and FFN. GLM team 2024, arXiv:2406.12793.

RoPE is half-split in files with RoPE sections, such as GLM-4.1V's (arXiv:2507.01006).
"""

from __future__ import annotations

from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.reading import is_off
from vkbackend.models.gguf.reader import GGUF


class Model(Decoder):
    post_norms = True

    def __init__(self, gguf: GGUF) -> None:
        self.half_split = not is_off(gguf.get("glm4.rope.dimension_sections", 0))
        super().__init__(gguf)
