"""cohere2moe (Command A+): cohere2 with experts chosen by sigmoid. The first layers are dense and have RoPE.
The results of routed and shared experts are averaged. Norms are RMS norms if the file says so.
The multi-token prediction head has RoPE and no window. Cohere 2026.
"""

from __future__ import annotations

from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures import command_r
from vkbackend.models.architectures.ahead import PredictsAhead
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.config import Config, with_windows
from vkbackend.models.architectures.memory_specs import LayerMemory
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import read_count, read_float, read_windowed
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import Gating


class Model(PredictsAhead, command_r.Model):
    windows = True
    mixture = Mixture(gating=Gating("sigmoid", norm_w=False))

    def read_config(self, gguf: GGUF) -> Config:
        self.logit_scale = read_float(gguf, "logit_scale", 1.0)
        self.centered = not read_float(gguf, "attention.layer_norm_rms_epsilon", 0.0)
        kind = "layer_norm_epsilon" if self.centered else "layer_norm_rms_epsilon"
        c = Config.from_gguf(gguf, self.mixture, norm_key=kind)
        n_target = len(c.layers) - self.n_ahead
        period = "cohere2moe.attention.sliding_window_pattern"
        if gguf.metadata.kind(period)[1]:
            local = read_windowed(gguf, n_target, 0)
        else:
            every = int(gguf.u32(period))
            local = tuple(not every or il % every > 0 for il in range(n_target))
        local += (False,) * self.n_ahead
        turned = (is_local or not la.mixture for is_local, la in zip(local, c.layers, strict=True))
        self.turned = tuple(turned)[:n_target] + (True,) * self.n_ahead
        return with_windows(c, read_count(gguf, "attention.sliding_window"), local)

    def has_rope(self, il: int) -> bool:
        return self.turned[il]

    def norm_ahead(self, x: Tensor, w: Weights, name: str) -> Tensor:
        return self.norm(x, w, name)

    def norm(self, x: Tensor, w: Weights, name: str) -> Tensor:
        return super().norm(x, w, name) if self.centered else ops.rms_norm(x, w(name), self.config.eps)

    def block(self, h: Tensor, w: Weights, cache: LayerMemory, il: int) -> Tensor:
        mixture = self.config.layers[il].mixture
        if not mixture:
            return super().block(h, w, cache, il)
        x = self.norm(h, w, "attn_norm")
        a = self.mix(x, w, cache, il)
        routed_by = ops.center(h) if self.centered else h  # A layer norm is the RMS norm of the centered row.
        f = mixture.forward(x, routed_by, w("attn_norm"), w, self.config.eps)
        return h + a + (ops.scale(f, 0.5) if mixture.n_shared else f)
