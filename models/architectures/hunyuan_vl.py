"""hunyuan_vl (the text model of HunyuanOCR): hunyuan-dense with a RoPE base multiplied by alpha^(d / (d -
2)), where d is the head size. In texts, all RoPE sections use the same position. Tencent Hunyuan team 2025,
arXiv:2511.19575.
"""

from __future__ import annotations

from dataclasses import replace

from vkbackend.models.architectures import hunyuan_dense
from vkbackend.models.architectures.reading import read_float
from vkbackend.models.gguf.reader import GGUF
from vkbackend.rope import RopeTable


class Model(hunyuan_dense.Model):
    def read_ropes(self, gguf: GGUF) -> dict[str, RopeTable]:
        table, dim = super().read_ropes(gguf)["rope"], self.config.layers[0].head_dim
        alpha = read_float(gguf, "rope.scaling.alpha", 1.0, low=0.0)
        return {"rope": replace(table, freq_base=table.freq_base * alpha ** (dim / (dim - 2)), sections=())}
