"""idefics3 (SmolVLM, SmolVLM2, Idefics3): SigLIP on tiles; a square of patches becomes a row (pixel shuffle).

Marafioti et al. 2025, arXiv:2504.05299; Laurençon et al. 2024, arXiv:2408.12637.
"""

from __future__ import annotations

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.vision.encoder import Encoder


class Model(Encoder):
    text_architectures = ("llama", "smollm3")
    marks = ("<fake_token_around_image>",)

    def check(self) -> None:
        self.check_square()

    def projector_weights(self) -> list[WeightSpec]:
        c = self.config
        return [WeightSpec("mm.model.fc.weight", (c.projection_dim, self.n_merged * c.n_embd))]

    def project(self, h: Tensor, w: Weights) -> Tensor:
        h = ops.joined_rows(self.norm(h, w, "v.post_ln"), self.n_merged)
        return linear(h, w, "mm.model.fc")
