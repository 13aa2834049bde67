"""gemma3 (Gemma 3 4B, 12B, 27B): SigLIP; the mean of a square of patches becomes a row. The rows of a picture
see each other in the text model. Gemma 3 Technical Report 2025, arXiv:2503.19786.
"""

from __future__ import annotations

import numpy as np

from vkbackend.errors import GGUFError
from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.models.vision.encoder import Encoder, read_matrix

PROJECTION = "mm.input_projection.weight"


class Model(Encoder):
    text_architectures = ("gemma3",)
    marks = ("<start_of_image>", "<end_of_image>")
    both_ways = True

    def __init__(self, gguf: GGUF) -> None:
        super().__init__(gguf)
        shape = self.config.n_embd, self.config.projection_dim
        if self._shapes.get(PROJECTION) != shape:
            raise GGUFError(
                f"{self._path}: {PROJECTION} has shape {self._shapes.get(PROJECTION)}, not {shape}"
            )
        # The file stores x W, not x W^T.
        self._projection = np.ascontiguousarray(read_matrix(gguf, PROJECTION).T)

    def check(self) -> None:
        self.check_square()

    def unread(self) -> set[str]:
        return super().unread() | {PROJECTION}

    def projector_weights(self) -> list[WeightSpec]:
        c = self.config
        return [
            WeightSpec("mm.soft_emb_norm.weight", (c.n_embd,)),
            WeightSpec(PROJECTION, (c.projection_dim, c.n_embd), values=self._projection),
        ]

    def project(self, h: Tensor, w: Weights) -> Tensor:
        h = ops.pool_rows(self.norm(h, w, "v.post_ln"), self.n_merged)
        h = ops.rms_norm(h, w("mm.soft_emb_norm"), self.config.eps)
        return ops.linear(h, w.tensor(PROJECTION))
