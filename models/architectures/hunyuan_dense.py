"""hunyuan-dense (Hunyuan, dense): qwen3, but RoPE precedes the norms of q and k heads. Tencent Hunyuan team
2025.
"""

from __future__ import annotations

from vkbackend.errors import UnsupportedModel
from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures import qwen3
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.memory_specs import KeyRotation


class Model(qwen3.Model):
    def key_rotation(self, il: int) -> KeyRotation | None:
        raise UnsupportedModel("keys are normed with weights after RoPE")

    def rotate(self, x: Tensor, w: Weights, name: str, il: int) -> Tensor:
        layer = self.config.layers[il]
        turned = ops.rope(x, layer.head_dim, layer.rope, half_split=self.half_split)
        return ops.head_norm(turned, w(f"{name}_norm"), layer.head_dim, self.config.eps)
