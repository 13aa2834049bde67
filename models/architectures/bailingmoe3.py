"""bailingmoe3 (Ling 3): kimi-linear with some changes. Latent attention uses RoPE and multiplies each head of
its result by a gate. The decay of the delta nets is bounded. The router chooses experts in groups. Some
layers bound the experts' activations. RoPE is half-split in files with RoPE sections (M-RoPE). inclusionAI
2026.
"""

from __future__ import annotations

from vkbackend.errors import GGUFError
from vkbackend.meta import ops
from vkbackend.meta.plan import rows
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures import kimi_linear
from vkbackend.models.architectures.base import Weights, linear
from vkbackend.models.architectures.config import Config, with_limits
from vkbackend.models.architectures.latent import LatentAttention
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import check_off, read_float
from vkbackend.models.architectures.weight_specs import WeightSpec
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import Gating
from vkbackend.rope import RopeTable


class Model(kimi_linear.Model):
    mixture = Mixture(gating=Gating("sigmoid", norm_w=False))
    applies_rope = True

    def read_config(self, gguf: GGUF) -> Config:
        self.bound = read_float(gguf, "kda.gate_lower_bound", 0.0)
        if self.bound >= 0:
            raise GGUFError(f"{gguf.paths[0]}: kda.gate_lower_bound is {self.bound}, expected below 0")
        if "bailingmoe3.kda.safe_gate" in gguf.metadata:
            check_off(gguf, "kda.safe_gate", True)
        return with_limits(super().read_config(gguf), gguf)

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        tables = LatentAttention.read_ropes(self, gguf)
        self.half_split = bool(tables["rope"].sections)
        return tables

    def attention_weights(self, il: int) -> list[WeightSpec]:
        specs, layer = super().attention_weights(il), self.config.layers[il]
        gate = WeightSpec("attn_gate", (layer.n_head, self.config.n_embd), rows("heads"))
        return specs if self.recurrent[il] else [*specs, gate]

    def gate_weights(self, n: int) -> list[WeightSpec]:
        return [WeightSpec(name, (n, self.config.n_embd), rows("k_heads")) for name in ("ssm_f_a", "ssm_g_a")]

    def gate(self, a: Tensor, x: Tensor, w: Weights) -> Tensor:
        return ops.gate_heads(linear(x, w, "attn_gate"), a, self.size_v)

    def decay_and_gate(self, x: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
        return linear(x, w, "ssm_f_a"), linear(x, w, "ssm_g_a")
