"""phimoe (Phi-3.5-MoE): layer norms and biases in all layers, RoPE factors for long contexts, and two
experts, each weighted by its own softmax (SparseMixer; Liu et al. 2024, arXiv:2409.12136). Abdin et al. 2024,
arXiv:2404.14219.
"""

from __future__ import annotations

import numpy as np

from vkbackend.formats import dequantize
from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.layer_normed import LayerNormed
from vkbackend.models.architectures.memory_specs import LayerMemory
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import read_count
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import Gating


class Model(LayerNormed):
    mixture = Mixture(gating=Gating("sparse_mixer"))
    freq_factors = True

    def __init__(self, gguf: GGUF) -> None:
        super().__init__(gguf)
        self.shifts = [self._shift(gguf, f"blk.{il}.") for il in range(self.n_layer)]

    def read_config(self, gguf: GGUF) -> Config:
        read_count(gguf, "expert_count")  # Optional in `read_mixtures`.
        return Config.from_gguf(gguf, self.mixture)

    def _shift(self, gguf: GGUF, prefix: str) -> np.ndarray | None:
        """Return the router's product with the bias of the norm before it, float32 [n_expert]."""
        names = f"{prefix}ffn_gate_inp.weight", f"{prefix}ffn_norm.bias"
        if not gguf.tensors.keys() >= set(names):
            return None
        router, bias = (
            dequantize(gguf.data(name), gguf.tensors[name].type, gguf.tensors[name].shape) for name in names
        )
        return (router.astype(np.float64) @ bias).astype(np.float32)

    def expert_weights(self, il: int) -> list[WeightSpec]:
        specs, shift = super().expert_weights(il), self.shifts[il]
        return (
            specs if shift is None else [*specs, WeightSpec("ffn_gate_inp.bias", shift.shape, values=shift)]
        )

    def block(self, h: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        mixture, norm = self.config.layers[il].mixture, self.pre_ffn_norm
        assert mixture
        h = h + self.mix(self.attention_input(h, w, il), w, cache, il)
        routed_by = ops.center(h)  # A layer norm is the RMS norm of the centered row.
        return h + mixture.forward(self.norm(h, w, norm), routed_by, w(norm), w, self.config.eps)
