"""bitnet (BitNet b1.58): llama with half-split RoPE, and norms before the output matrices of attention and
the FFN. Ma et al. 2024, arXiv:2402.17764; 2025, arXiv:2504.12285.
"""

from __future__ import annotations

from vkbackend.errors import UnsupportedModel
from vkbackend.meta import ops
from vkbackend.meta.ops.wide import wide_norms
from vkbackend.meta.plan import rows
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.decoder import Decoder
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF


class Model(Decoder):
    def read_config(self, gguf: GGUF) -> Config:
        act = gguf.string("bitnet.hidden_activation", "silu")
        if act not in ("silu", "relu2"):
            raise UnsupportedModel(f"bitnet.hidden_activation = {act!r} is not supported; silu and relu2 are")
        self.squares = act == "relu2"
        return super().read_config(gguf)

    def attention_weights(self, il: int) -> list[WeightSpec]:
        layer = self.config.layers[il]
        norm = WeightSpec("attn_sub_norm", (layer.n_head * layer.head_dim_v,), rows("heads"))
        return [*super().attention_weights(il), norm]

    def feed_forward_weights(self, il: int) -> list[WeightSpec]:
        norm = WeightSpec("ffn_sub_norm", (self.config.layers[il].n_ff,), rows("ffn"))
        return [*super().feed_forward_weights(il), norm]

    def gate(self, a: Tensor, x: Tensor, w: Weights) -> Tensor:
        return wide_norms([(a, w("attn_sub_norm"))], self.config.eps)[0]

    def feed_forward(self, x: Tensor, w: Weights, il: int) -> Tensor:
        y = self.activate(linear(x, w, "ffn_gate"), linear(x, w, "ffn_up"))
        return linear(wide_norms([(y, w("ffn_sub_norm"))], self.config.eps)[0], w, "ffn_down")

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        return ops.mul(ops.relu2(gate), up) if self.squares else super().activate(gate, up)
