"""falcon (Falcon 7B, 40B, 180B): layer norms, attention and FFN in parallel, and GELU with the error
function. In 40B and 180B, attention and FFN have separate norms. Almazrouei et al. 2023, arXiv:2311.16867.
"""

from __future__ import annotations

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.layer_normed import LayerNormed
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF


class Model(LayerNormed):
    parallel = True
    gated = False

    def read_config(self, gguf: GGUF) -> Config:
        self.norms_apart = "blk.0.attn_norm_2.weight" in gguf.tensors
        if self.norms_apart:
            self.pre_ffn_norm = "attn_norm"
        return super().read_config(gguf)

    def attention_weights(self, il: int) -> list[WeightSpec]:
        specs, n_embd, prefix = super().attention_weights(il), self.config.n_embd, f"blk.{il}."
        if not self.norms_apart:
            return specs
        # attn_norm is the FFN's norm, so it is among the FFN's weights.
        norm = self.norm_weights([WeightSpec("attn_norm_2", (n_embd,))], prefix)
        return [*norm, *(spec for spec in specs if not spec.name.startswith("attn_norm"))]

    def attention_input(self, h: Tensor, w: Weights, il: int) -> Tensor:
        return self.norm(h, w, "attn_norm_2" if self.norms_apart else "attn_norm")

    def activate_alone(self, x: Tensor, il: int) -> Tensor:
        return ops.gelu_erf(x)
