"""stablelm (StableLM 3B, StableLM 2 1.6B): decoder.py with layer norms, RoPE on a part of each head, and
optional biases of q, k and v. Bellagamba et al. 2024, arXiv:2402.17834.
"""

from __future__ import annotations

from vkbackend.errors import UnsupportedModel
from vkbackend.models.architectures.layer_normed import LayerNormed
from vkbackend.models.gguf.reader import GGUF


class Model(LayerNormed):
    def __init__(self, gguf: GGUF) -> None:
        if "blk.0.ffn_norm.weight" not in gguf.tensors and "blk.0.attn_q_norm.weight" in gguf.tensors:
            raise UnsupportedModel(
                f"{gguf.paths[0]}: layer norms of heads (StableLM 2 12B) are not supported"
            )
        super().__init__(gguf)
