"""nemotron_h_moe (Nemotron 3 Nano): nemotron_h with experts and a shared expert instead of FFNs. The experts
have no gates. A sigmoid plus a bias chooses experts; the sigmoid alone weighs them. The multi-token
prediction head has both attention and experts, and ends with a layer norm. NVIDIA 2025, arXiv:2512.20848.
"""

from __future__ import annotations

from collections.abc import Mapping

from vkbackend.meta import ops
from vkbackend.meta.policy import Layer
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures import nemotron_h
from vkbackend.models.architectures.ahead import PredictsAhead
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.memory_specs import LayerCache
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import check_off
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import Gating


class Model(PredictsAhead, nemotron_h.Model):
    mixture: Mixture | None = Mixture(gating=Gating("sigmoid"), act="relu2_alone")

    def read_config(self, gguf: GGUF) -> Config:
        check_off(gguf, "moe_latent_size")  # not supported: in Nemotron 3 Super, experts read a latent vector
        return super().read_config(gguf)

    def feed_forward_weights(self, il: int) -> list[WeightSpec]:
        if not self.is_ahead(il):
            return super().feed_forward_weights(il)
        return [WeightSpec("post_attention_norm", (self.config.n_embd,)), *self.expert_weights(il)]

    def layer(self, il: int, types: Mapping[str, str]) -> Layer:
        if not self.is_ahead(il):
            return super().layer(il, types)
        return Layer(self.attention_of(il, types), self.feed_forward_of(il, types))

    def norm_ahead(self, x: Tensor, w: Weights, name: str) -> Tensor:
        if name != "nextn.shared_head_norm":
            return super().norm_ahead(x, w, name)
        return ops.layer_norm(x, w(name), None, self.config.eps)

    def ahead_block(self, x: Tensor, w: Weights, cache: LayerCache, il: int) -> Tensor:
        eps, norm, mixture = self.config.eps, w("post_attention_norm"), self.config.layers[il].mixture
        assert mixture
        h = x + self.mix(ops.rms_norm(x, w("attn_norm"), eps), w, cache, il)
        return h + mixture.forward(ops.rms_norm(h, norm, eps), h, norm, w, eps)
