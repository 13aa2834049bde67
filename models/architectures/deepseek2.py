"""deepseek2 (DeepSeek V2, V3, R1, Kimi K2, GLM-4.7-Flash): latent attention (latent.py). All but the first
layers have experts and a shared expert. V2 chooses experts by softmax. V3 scores experts by sigmoid plus
bias, and chooses among the best groups. YaRN scales q k^T by (1 + m ln(factor))^2, where m is its log
multiplier, and leaves cos and sin unscaled. DeepSeek-AI 2024, arXiv:2405.04434 and arXiv:2412.19437.
"""

from __future__ import annotations

import math
from dataclasses import replace

from vkbackend.models.architectures.ahead import PredictsAhead
from vkbackend.models.architectures.config import Config
from vkbackend.models.architectures.latent import LatentAttention
from vkbackend.models.architectures.mixture import Mixture
from vkbackend.models.architectures.reading import read_float, read_temperature
from vkbackend.models.gguf.reader import GGUF
from vkbackend.ops.moe import Gating
from vkbackend.rope import RopeTable


class Model(PredictsAhead, LatentAttention):
    mixture = Mixture(gating=Gating(norm_w=False))

    def read_config(self, gguf: GGUF) -> Config:
        c = self.read_latent(gguf, Config.from_gguf(gguf, self.mixture))
        factor = read_float(gguf, "rope.scaling.factor", 1.0)
        self.log_multiplier = read_float(gguf, "rope.scaling.yarn_log_multiplier", 0.0)
        grown = (1 + self.log_multiplier * math.log(max(factor, 1.0))) ** 2
        return replace(c, layers=tuple(replace(layer, scale=layer.scale * grown) for layer in c.layers))

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        table = super().read_ropes(gguf)["rope"]
        if table.scaling == "yarn" and self.log_multiplier:
            table = replace(table, attn_factor=table.attn_factor / (1 + 0.1 * math.log(table.factor)))
        hot = read_temperature(gguf, self.config.n_ctx_train)
        self.q_rope = "rope_q" if hot["temperature"] else "rope"
        if not hot["temperature"]:
            return {"rope": table}
        still = RopeTable(self.nope, sections=(0, 0, 0, self.nope // 2), **hot)
        return {"rope": table, "rope_q": replace(table, **hot), "still_q": still}
