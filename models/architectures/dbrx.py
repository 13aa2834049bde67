"""dbrx (DBRX): layer norms without biases, clamped q, k and v, experts in every layer. Databricks 2024."""

from __future__ import annotations

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.layer_normed import LayerNormed
from vkbackend.models.architectures.memory_specs import LayerMemory
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import read_count
from vkbackend.models.gguf.reader import GGUF


class Model(LayerNormed):
    mixture = Mixture()
    clamps = True
    pre_ffn_norm = "attn_output_norm"

    def read_config(self, gguf: GGUF) -> Config:
        read_count(gguf, "expert_count")  # Optional in `read_mixtures`.
        return super().read_config(gguf)

    def block(self, h: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        mixture, norm = self.config.layers[il].mixture, self.pre_ffn_norm
        assert mixture
        h = h + self.mix(self.attention_input(h, w, il), w, cache, il)
        routed_by = ops.center(h)  # A layer norm is the RMS norm of the centered row.
        return h + mixture.forward(self.norm(h, w, norm), routed_by, w(norm), w, self.config.eps)
