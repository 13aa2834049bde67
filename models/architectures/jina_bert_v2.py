"""jina-bert-v2 (jina-embeddings-v2): encoder.py with ALiBi and a gated FFN. Günther et al. 2023,
arXiv:2310.19923.
"""

from __future__ import annotations

from vkbackend.errors import UnsupportedModel
from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.alibi import Alibi
from vkbackend.models.architectures.encoder import Encoder
from vkbackend.models.gguf.reader import GGUF


class Model(Alibi, Encoder):
    gated = True

    def __init__(self, gguf: GGUF) -> None:
        super().__init__(gguf)
        for name in ("attn_q_norm", "attn_k_norm", "attn_norm_2"):
            if f"blk.0.{name}.weight" in gguf.tensors:
                raise UnsupportedModel(
                    f"{gguf.paths[0]}: {name} (jina-embeddings-v2-base-code) is not supported; the other "
                    "models of jina-embeddings-v2 are"
                )

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return ops.gelu_mul(gate, up)
