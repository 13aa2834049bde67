"""internvl (InternVL 2.5, 3, 3.5): a class token, and factors for the results of attention and FFN. 2 x 2
patches become a row. Chen et al. 2023, arXiv:2312.14238.
"""

from __future__ import annotations

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor, Weight
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.vision.class_token import WithClassToken

NORM_EPS = 1e-5  # epsilon of the projector's norm


class Model(WithClassToken):
    text_architectures = ("qwen2", "qwen3", "qwen3moe", "llama", "gpt-oss")
    marks = ("<img>", "</img>")

    # ---- weights ----

    def layer_weights(self, il: int) -> list[WeightSpec]:
        n = self.config.n_embd
        scales = [WeightSpec(name, (n,)) for name in ("ls1", "ls2")]
        norms = [WeightSpec(name, (n,)) for name in ("attn_q_norm", "attn_k_norm")]
        return [*super().layer_weights(il), *scales, *(norms if self._has(f"v.blk.{il}.attn_q_norm") else [])]

    def projector_weights(self) -> list[WeightSpec]:
        n_in, n_out, at = self.n_merged * self.config.n_embd, self.config.projection_dim, "mm.model.mlp"
        shapes = ((0, (n_in,)), (1, (n_out, n_in)), (3, (n_out, n_out)))
        return [WeightSpec(f"{at}.{i}.weight", shape) for i, shape in shapes]

    # ---- graph ----

    def block(self, h: Tensor, w: Weights, cells: Weight, il: int) -> Tensor:
        h = h + ops.mul_vector(self.attention(self.norm(h, w, "ln1"), w, cells, il), w("ls1"))
        return h + ops.mul_vector(self.feed_forward(self.norm(h, w, "ln2"), w), w("ls2"))

    def norm(self, x: Tensor, w: Weights, name: str) -> Tensor:
        """The norms of the largest encoder (45 layers) have no bias, and are RMS norms."""
        if w.bias(name) is None:
            return ops.rms_norm(x, w(name), self.config.eps)
        return super().norm(x, w, name)

    def rotate(self, x: Tensor, w: Weights, name: str) -> Tensor:
        return self.norm(x, w, f"{name}_norm") if w.has(f"{name}_norm") else x

    def activate(self, x: Tensor) -> Tensor:
        return ops.gelu_erf(x) if self.config.activation == "gelu" else super().activate(x)

    def project(self, h: Tensor, w: Weights) -> Tensor:
        at, h = "mm.model.mlp", ops.joined_rows(h, self.n_merged)
        h = ops.layer_norm(h, w(f"{at}.0"), w.bias(f"{at}.0"), NORM_EPS)
        return self.linear(ops.gelu_erf(self.linear(h, w, f"{at}.1")), w, f"{at}.3")
