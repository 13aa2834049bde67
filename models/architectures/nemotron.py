"""nemotron (Nemotron-4, Minitron): layer norms, RoPE on a part of each head, and an FFN with squared ReLU and
no gate. Files store each norm's weight w as 1 + w. Parmar et al. 2024, arXiv:2402.16819; Muralidharan et al.
2024, arXiv:2407.14679.
"""

from __future__ import annotations

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.layer_normed import LayerNormed


class Model(LayerNormed):
    gated = False

    def activate_alone(self, x: Tensor, il: int) -> Tensor:
        return ops.relu2(x)
