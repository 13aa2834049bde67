"""mistral3 (Ministral 3): llama with a temperature t of q. The cos and sin for q include the factor 1 + t
ln(1 + floor(p / n)), with position p and original context length n. YaRN's scale of cos and sin is divided by
1 + 0.1 m ln(factor), where m is YaRN's log multiplier. With m = 1 cos and sin are unscaled. Meta 2025 (the
temperature, from Llama 4); Peng et al. 2023, arXiv:2309.00071.
"""

from __future__ import annotations

import math
from dataclasses import replace

from vkbackend.errors import GGUFError, UnsupportedModel
from vkbackend.meta import ops
from vkbackend.meta.tensor import Tensor
from vkbackend.models.architectures import llama
from vkbackend.models.architectures.base import Weights
from vkbackend.models.architectures.reading import read_float, read_temperature
from vkbackend.models.gguf.reader import GGUF
from vkbackend.rope import RopeTable


class Model(llama.Model):
    mixture = None

    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        table = super().read_ropes(gguf)["rope"]
        if table.scaling == "yarn":
            log_multiplier = read_float(gguf, "rope.scaling.yarn_log_multiplier", 0.0)
            grown = 1 + 0.1 * log_multiplier * math.log(table.factor)
            if grown <= 0:
                raise GGUFError(
                    f"{gguf.paths[0]}: yarn_log_multiplier is {log_multiplier}, too low for a positive scale"
                )
            table = replace(table, attn_factor=table.attn_factor / grown)
        hot = read_temperature(gguf, self.config.n_ctx_train)
        if hot["temperature"] and any(layer.n_rot < layer.head_dim for layer in self.config.layers):
            raise UnsupportedModel(
                f"{gguf.paths[0]}: mistral3 with RoPE on a part of each head is not supported"
            )
        return {"rope": table, "rope_q": replace(table, **hot)}

    def rotate(self, x: Tensor, w: Weights, name: str, il: int) -> Tensor:
        table = "rope_q" if name == "attn_q" else "rope"
        return ops.rope(x, self.config.layers[il].head_dim, table, half_split=False)
