"""mpt (MPT 7B and 30B): layer norms without biases, ALiBi, an FFN with GELU (error function) and no gate, and
in some models a limit of q, k and v. MosaicML 2023.
"""

from __future__ import annotations

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.alibi import Alibi
from vkbackend.models.architectures.layer_normed import LayerNormed
from vkbackend.models.gguf.reader import GGUF
from vkbackend.rope import RopeTable


class Model(Alibi, LayerNormed):
    clamps = True
    gated = False
    default_max_bias = 0.0

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        return {}

    def has_rope(self, il: int) -> bool:
        return False

    def activate_alone(self, x: Tensor, il: int) -> Tensor:
        return ops.gelu_erf(x)
