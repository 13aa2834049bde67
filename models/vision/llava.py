"""mlp (LLaVA 1.5): CLIP on one square; each patch becomes a row. The projector reads the output of the last
layer but one, so the file lacks CLIP's last layer. Liu et al. 2023, arXiv:2310.03744.
"""

from __future__ import annotations

from vkbackend.errors import UnsupportedModel
from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.vision.class_token import WithClassToken


class Model(WithClassToken):
    text_architectures = ("llama", "phi3", "qwen2")

    def check(self) -> None:
        super().check()
        c = self.config
        if c.tile_sizes:
            raise UnsupportedModel(
                f"{self._path}: the tiles of LLaVA 1.6 (clip.vision.image_grid_pinpoints) are not supported"
            )
        if c.feature_layers not in ((), (c.n_layer,)):
            raise UnsupportedModel(
                f"{self._path}: the projector reads the layers {list(c.feature_layers)} "
                f"(clip.vision.feature_layer) of {c.n_layer}; only the last can be read"
            )
        if self._has("v.post_ln"):
            raise UnsupportedModel(f"{self._path}: CLIP's last norm (v.post_ln) is not used by LLaVA")

    def projector_weights(self) -> list[WeightSpec]:
        n_in, n_out = self.config.n_embd, self.config.projection_dim
        return [WeightSpec("mm.0.weight", (n_out, n_in)), WeightSpec("mm.2.weight", (n_out, n_out))]

    def project(self, h: Tensor, w: Weights) -> Tensor:
        return self.linear(ops.gelu_erf(self.linear(h, w, "mm.0")), w, "mm.2")
